"""What run_pretraining.py refuses, before anything is written."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY, VOCAB_FILE, sample_rows, write_shard, write_shards
from encoder_cases import ROBERTA
from refusal_tables import Refusal, refusals
from safetensors.torch import load_file, save_file
from small_runs import files_of, steps_folder, train

import run_pretraining

AUTO = "--last-step-of-checkpoint auto"
NO_REPORT = "--report-file None"  # it would be written to the output folder before
SHARD = "--data-parallel-shard-degree"


@pytest.fixture(scope="module")
def places(inputs, tmp_path_factory) -> dict[str, Path]:
    """A run that was stopped at step 2 of 4, copies of it, and models that are damaged."""
    parent = tmp_path_factory.mktemp("trained")
    flags = ("--max-steps", 4, "--steps-this-run", 2, "--num-steps-per-checkpoint", 1)
    train(inputs.command(parent / "run", *flags))
    places = {name: parent / name for name in ("run", "cut", "nan", "zeros")}
    places["steps"] = steps_folder(parent / "run")
    model = places["steps"] / "2"
    for name in ("cut", "nan", "zeros"):
        shutil.copytree(model, places[name], ignore=shutil.ignore_patterns("manifest.json"))
    (places["cut"] / "model.safetensors").write_bytes(
        (model / "model.safetensors").read_bytes()[:90_000]
    )
    tensors = load_file(model / "model.safetensors")
    tensors["bert.pooler.dense.bias"][3] = torch.nan
    save_file(tensors, places["nan"] / "model.safetensors")
    tensors = load_file(model / "model.safetensors")
    tensors["bert.embeddings.word_embeddings.weight"].zero_()
    save_file(tensors, places["zeros"] / "model.safetensors")
    return places | {"held_out": inputs.held_out, "shards": inputs.shards}


def config(**changes) -> dict:
    values = {**TINY, "vocab_size": 1210, **changes}
    return {key: value for key, value in values.items() if value is not ...}


def shard(**attributes):
    return lambda path: write_shard(path, sample_rows(40, 32, 5, seed=9), attributes)


def cut_off_shard(path: Path) -> None:
    shard()(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.98)])


def vocabulary_in_another_order() -> str:
    words = VOCAB_FILE.read_text(encoding="utf-8").splitlines()[:1210]
    words[900], words[901] = words[901], words[900]
    return "\n".join(words) + "\n"


OF_ANOTHER_PROJECT = "is a checkpoint of another project...convert_checkpoint.py"
COMMAND_LINES = [
    ("--max-step 9", "--max-step"),  # prefixes of flags are not accepted
    ("--frobnicate", "--frobnicate"),
    *(
        (f"{flag}=", f"{flag}: the value is empty: give one, or leave it out")
        for flag in ("--output-dir", "--eval-dir", "--tensorboard-dir", "--wandb-project")
    ),
    ("--error there is no preset --seed 1", "there is no preset (see...--help"),
    ("stray", "stray"),
    ("--max-steps -1", "--max-steps: expected a whole number >= 1, not -1"),
    ("--optim x", "--optim is not a flag of this program: use --optimizer AdamW"),
    ("--gradient_checkpointing true", "use --activation-checkpoint full"),
    ("--train-batch-size 8", "is not a flag of this program: in NVIDIA's PyTorch recipe"),
    ("--optimizer Adam", "'Adam'"),
    ("--learning-rate nan", "--learning-rate/--lr: expected a number >= 0, not nan"),
    ("--warmup-proportion 1.5", "--warmup-ratio: expected a number <= 1, not 1.5"),
    ("--beta2 1", "--beta2"),
    ("--seed 18446744073709551616", "--seed: expected a whole number <= 1.84467440737e+19"),
    ("--last-step-of-checkpoint newest", "expected None, auto or a step, not newest"),
    ("--amp perhaps", "--amp: expected true or false, not 'perhaps'"),
    ("--learning-rate", "--learning-rate/--lr: expected one argument"),
    ("--lamb-max-coeff 0", "--lamb-max-coeff"),
    ("--dropout 1.5", "--dropout"),
    ("--layerwise-lr-decay 1.5", "--layerwise-lr-decay"),
    ("--estimate-memory 0", "--estimate-memory...>= 1"),
    # Flags that contradict each other, or have no effect without another one.
    ("--overwrite-output-dir --benchmark", "--overwrite-output-dir cannot be combined with"),
    ("--gradient-merge-steps 1 --global-batch-size 8", "combined with --global-batch-size"),
    ("--phase1 --phase2", "--phase1 cannot be combined with --phase2"),
    ("--lamb-min-coeff 0.1 --optimizer AdamW", "has no effect without --optimizer Lamb"),
    ("--optimizer AdamW --lamb-bias-correction false", "--lamb-bias-correction"),
    ("--lr-rewarmup", "--lr-rewarmup has no effect without --from-phase1-final-params"),
    ("--scale-loss 8", "--scale-loss has no effect without --amp or --use-pure-fp16 or --fp16"),
    ("--from-phase1-final-params p", "--from-phase1-final-params has no effect without --phase2"),
    ("--deepspeed-config c", "--deepspeed-config has no effect without --deepspeed"),
    ("--benchmark --steps-this-run 3", "--steps-this-run"),
    ("--freeze-encoder-steps 3", "no effect without --from-pretrained-params"),
    (AUTO, "--from-checkpoint"),
    ("--phase2 --from-phase1-final-params . --from-pretrained-params .", "with --from-pretrained"),
    ("--config-file None", "--bert-model custom needs --config-file"),
    ("--vocab-file None", "--vocab-file"),
]
VALUES = [
    ("--max-seq-length 64", "--max-seq-length 32, and this run has 64"),
    ("--max-predictions-per-seq 7", "7"),
    ("--max-steps 2147483647", "2147483647 updates...--steps-this-run"),
    ("--freeze-layers 3", "the model has 2 layers"),
    ("--profile-update 5", "--profile-update 5: the run has 4 updates"),
    (
        "--max-steps 9 --benchmark --benchmark-warmup-steps 2 --profile-update 3",
        "give one of the warmup, at most 2",
    ),
    (f"--estimate-memory 6 {SHARD} 4", "do not multiply to the 6 processes"),
    (f"--estimate-memory 2 {SHARD} 2 --enable-cpu-offload", "for GPUs"),
    ("--global-rope-theta 5", "--global-rope-theta is not for custom, a bert model"),
    # Of shards that have masks already.
    ("--masked-lm-prob 0.2", "--masked-lm-prob...{shards}...--dynamic-masking"),
    ("--whole-word-mask", "--whole-word-mask...{shards}...--dynamic-masking"),
]
FILES = [
    ("--from-checkpoint /nowhere/at/all", "/nowhere/at/all does not exist"),
    ("--from-checkpoint /nowhere --last-step-of-checkpoint 7", "/nowhere/7 does not exist"),
    ("--from-pretrained-params /nowhere/at/all", "/nowhere/at/all does not exist"),
    ("--phase2 --from-phase1-final-params /nowhere/at/all", "/nowhere/at/all does not exist"),
    ("--input-dir /nowhere/at/all", "/nowhere/at/all does not exist"),
    ("--eval-dir /nowhere/at/all", "/nowhere/at/all does not exist"),
    ("--config-file /nowhere/config.json", "/nowhere/config.json does not exist"),
    ("--vocab-file /", "/ has no tokenizer"),
    ("--input-dir {folder}/empty", "empty", {"empty/x": ""}),
    ("--from-pretrained-params {folder}/empty", "holds neither model", {"empty/x": ""}),
    (
        "--input-dir {folder}/shards",
        "shards...vocab.txt",
        {"shards/a.hdf5": shard(vocab_sha256="0" * 64)},
    ),
    ("--input-dir {folder}/shards", "a.hdf5", {"shards/a.hdf5": cut_off_shard}),
    *(
        ("--vocab-file {folder}/v.txt", f"v.txt...{says}", {"v.txt": content})
        for says, content in (
            ("has no [MASK]", "[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n"),
            ("line 8...'a'...line 6", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\na\n"),
            ("line 3...empty line", "[PAD]\n[UNK]\n\n[CLS]\n[SEP]\n[MASK]\n"),
            ("line 3...UTF-8", b"[PAD]\n[UNK]\n\xff\n"),
            ("UTF-8", bytes(range(256))),
        )
    ),
    *(
        ("--config-file {folder}/c.json", says, {"c.json": content})
        for says, content in (
            ("32...16 positions", config(max_position_embeddings=16)),
            ("unknown key 'hidden_sise': correct it, or add model_type", config(hidden_sise=3)),
            ("missing key 'num_hidden_layers'", config(num_hidden_layers=...)),
            ("hidden_act is 'relu'", config(hidden_act="relu")),
            ("not a multiple", config(num_attention_heads=5)),
            ("whole number", config(hidden_size="32")),
            # Of Jina's models, and of MPNet's: there is nothing to correct.
            (
                "only 'absolute' is supported: use another model",
                config(position_embedding_type="alibi"),
            ),
            ("'mpnet', and only bert, mod...such a model (docs/", config(model_type="mpnet")),
            *(
                (says, config(**ROBERTA, model_type="roberta") | {key: value})
                for says, key, value in (
                    (
                        "position_embedding_type is 'relative_key'",
                        "position_embedding_type",
                        "relative_key",
                    ),
                    ("pad_token_id is -1", "pad_token_id", -1),
                    ("pad_token_id is None", "pad_token_id", None),
                    ("is_decoder is True", "is_decoder", True),
                    ("hidden_size is None", "hidden_size", None),
                )
            ),
            ("1210...1000", config(vocab_size=1000)),
            ("1210...30522", config(vocab_size=30522)),
            (
                "million parameters...with their optimizer state, and cpu has...use a smaller",
                config(hidden_size=2**16, intermediate_size=2**18, num_hidden_layers=64),
            ),
            ("c.json", ""),
            ("c.json", "[1, 2]"),
        )
    ),
    *(
        ("--output-dir {folder}/out " + NO_REPORT, "/out", {place: make})
        for place, make in (
            ("out", "a file"),
            ("out", lambda path: path.symlink_to(path)),
            ("out/custom/phase1", "a file"),
        )
    ),
    ("--report-file {folder}", "--report-file"),
    ("--report-file {folder}/report", "report...--report-file", {"report": "mine"}),
    *(
        (flags, f"/{file.rpartition('/')[2]} {OF_ANOTHER_PROJECT}", {file: b"\x80\x04"})
        for flags, file in (
            (f"--from-checkpoint {{folder}}/given {AUTO}", "given/bert_paddle.pdparams"),
            ("--from-checkpoint {folder}/given/ckpt_600.pt", "given/ckpt_600.pt"),
            ("--from-pretrained-params {folder}/given", "given/ckpt_600.pt"),
            # NVIDIA's folders of steps have the same names.
            (
                f"--max-steps 700 --output-dir {{folder}}/nvidia {NO_REPORT}",
                "nvidia/custom/phase1/600/bert_paddle.pdparams",
            ),
        )
    ),
]
IN_ITS_FOLDER = "--output-dir {run} " + NO_REPORT
RESUMED = f"{IN_ITS_FOLDER} --from-checkpoint {{steps}} {AUTO}"
CHECKPOINTS = [
    (f"--from-checkpoint {{folder}}/a {AUTO}", "a is a file: give the folder", {"a": ""}),
    # A typing error must not start from random weights.
    (f"--from-checkpoint {{folder}}/typo {AUTO}", "typo holds no checkpoint"),
    ("--from-checkpoint {steps}", f"a folder of steps...{AUTO}"),
    ("--phase2 --from-phase1-final-params {steps}", "phase 1 is unfinished...step 2 of 4"),
    (IN_ITS_FOLDER, "{steps}...step 2...--resume-from-checkpoint...--output-dir"),
    (
        IN_ITS_FOLDER + " --from-checkpoint {steps}/1",
        "{steps}...step 2...--resume-from-checkpoint...--output-dir",
    ),
    (f"{RESUMED} --seed 1", "{steps}...seed 42 (this run uses 1)...--output-dir"),
    (f"{RESUMED} --input-dir {{held_out}}", "{steps}...other data...--output-dir"),
    (f"{RESUMED} --dropout 0.3", "{steps}...hidden_dropout_prob 0.1 (this run uses 0.3)"),
    (
        f"{RESUMED} --from-pretrained-params {{steps}}/1",
        "{steps}...starting weights random (this run uses...--output-dir",
    ),
    (
        f"{RESUMED} --vocab-file {{folder}}/vocab.txt",
        "{steps}/2/vocab.txt and...contain different tokens",
        {"vocab.txt": vocabulary_in_another_order()},
    ),
    # In another folder.
    ("--from-checkpoint {steps}/2 --seed 1", "{steps}/2...seed 42 (this run uses 1)"),
    ("--from-checkpoint {steps}/2 --input-dir {held_out}", "{steps}/2...other data"),
    (
        "--from-checkpoint {steps}/2 --input-dir {folder}/others",
        "{steps}/2...other data",
        {"others": lambda path: write_shards(path, seed=5)},
    ),
    *(
        (
            f"{flag} {{steps}}/2 --config-file {{folder}}/c.json",
            says,
            {"c.json": config(hidden_size=48)},
        )
        for flag, says in (
            ("--from-pretrained-params", "[1210, 32]...[1210, 48]"),
            ("--from-checkpoint", "hidden_size 32 (this run uses 48)"),
        )
    ),
    ("--from-pretrained-params {cut}", "cut/model.safetensors"),
    ("--from-pretrained-params {nan}", "the weights are not all finite: they are damaged, or of"),
    ("--from-pretrained-params {zeros}", "all word embeddings are zero: the weights"),
    (f"{RESUMED} --model-prefix bert", "bert_progress.json...--model-prefix"),
    # Of the same shapes: only the config, the vocabulary and the shards tell.
    (
        "--from-pretrained-params {steps}/2 --config-file {folder}/c.json",
        "{steps}/2/config.json...num_attention_heads is 2...4",
        {"c.json": config(num_attention_heads=4)},
    ),
    (
        "--from-pretrained-params {steps}/2 --vocab-file {folder}/vocab.txt",
        "{steps}/2/vocab.txt...different tokens",
        {"vocab.txt": vocabulary_in_another_order()},
    ),
    *(
        (
            f"--from-pretrained-params {{steps}}/2 {flag} {{folder}}/shards",
            f"shards is {casing}, and {{steps}}/2 is lower-cased",
            {"shards/a.hdf5": shard(**attributes)},
        )
        for flag, casing, attributes in (
            ("--input-dir", "cased", {"do_lower_case": False}),
            ("--eval-dir", "cased", {"do_lower_case": False}),
            (
                "--input-dir",
                "lower-cased with accents",
                {"do_lower_case": True, "strip_accents": False},
            ),
        )
    ),
]


@refusals(*COMMAND_LINES, *VALUES, *FILES, *CHECKPOINTS)
def test_run_pretraining_refuses(refusal: Refusal, inputs, places, tmp_path):
    before = files_of(places["run"])
    command = inputs.command(tmp_path / "output", "--max-steps", 4)
    refusal.check(run_pretraining.main, command, tmp_path, **places)
    assert files_of(places["run"]) == before
