"""The presets of models that are sharded, and what their configs hold."""

import pytest
import torch
from conftest import ROOT
from launch_scripts import Checkout, parsed

from arguments import make_run_config
from checkpoint.model_choice import choose_model, read_config
from diagnostics.estimates import MemorySettings, estimate_memory
from encoders.bert import BertForPreTraining

GPU_MEMORY = 80e9
LIBRARIES = 2e9  # CUDA, NCCL and what the allocator cannot reuse


@pytest.mark.parametrize(("name", "millions"), [("0.7b", 732), ("1.3b", 1281), ("13b", 12797)])
def test_a_config_has_the_number_of_parameters_of_its_name(name, millions):
    config = read_config(ROOT / "bert_configs" / f"bert-{name}-uncased.json")
    with torch.device("meta"):
        model = BertForPreTraining(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


@pytest.mark.parametrize("name", ["1p3b", "13b"])
def test_a_preset_with_its_flags_is_sharded_and_fits_an_80_gb_gpu(tmp_path, name):
    checkout = Checkout(tmp_path)
    result = checkout.run(
        f"source scripts/configs/pretrain_config.sh; EXTRA_ARGS=$flags_{name} "
        f"bash scripts/run_pretraining.sh $(dgxh100-80g_8gpu_amp_{name})"
    )
    assert result.returncode == 0, result.stderr
    for args, length in zip(map(parsed, checkout.calls()), (128, 512), strict=True):
        assert (args.data_parallel_shard_degree, args.use_pure_fp16, args.max_seq_length) == (-1, True, length)
        assert args.config_file.name == f"bert-{name.replace('p', '.')}-uncased.json"
        config = make_run_config(args, world_size=8)
        with torch.device("meta"):
            model = BertForPreTraining(choose_model(config.model).config)
        settings = MemorySettings(config)
        assert (settings.world_size, settings.parallel.shard_degree, settings.device.type) == (8, 8, "cuda")
        assert GPU_MEMORY / 4 < estimate_memory(model, settings).total < GPU_MEMORY - LIBRARIES
