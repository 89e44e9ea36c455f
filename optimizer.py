"""The optimizers, for your own loop. Training programs choose one by --optimizer.

    from modeling import BertConfig, BertForMaskedLM
    from optimizer import Lamb, parameter_groups

    model = BertForMaskedLM(BertConfig(1000, 64, 2, 2, 128))
    optimizer = Lamb(parameter_groups(model, weight_decay=0.01), lr=6e-3)

They follow torch's protocol for fused optimizers (loss scale and skipped steps without
synchronization), and update shards of parameters as whole ones. To add one: CONTRIBUTING.md.
"""

# Which parameters have weight decay; and a step with a scale, or none if a gradient is not finite
from bert_recipe.optimization.protocol import apply_step, parameter_groups

# LAMB (You et al., 2020) as in NVIDIA's recipe, and DeepSpeed's variant of it
from bert_recipe.optimization.lamb import Lamb

# Orthogonalized updates of whole matrices, AdamW for the rest, and their groups
from bert_recipe.optimization.muon import Muon, NorMuon, muon_groups

# torch's, which takes sparse gradients of word embeddings, too
from bert_recipe.optimization.adamw import AdamW
