"""The losses, as sums over a micro-batch: the trainer divides once, by the counts of the global
batch, so that gradients do not depend on how it is divided.

    import torch
    from loss import linear_cross_entropy

    states, weight, bias = torch.randn(4, 8), torch.randn(50, 8), torch.zeros(50)
    total, correct = linear_cross_entropy(states, weight, bias, torch.tensor([3, 7, -100, 49]))
    mean = total / 3  # -100 is ignored

All lie in bert_recipe/model/loss.py. Which task uses which: `sums` in bert_recipe/tasks/.
"""

# Masked words: the output layer and the cross-entropy in one, without logits in float32
from bert_recipe.model.loss import linear_cross_entropy

# Next sentence
from bert_recipe.model.loss import next_sentence_sums

# Classes of texts and of tokens
from bert_recipe.model.loss import summed_cross_entropy

# Start and end of an answer, as in SQuAD
from bert_recipe.model.loss import span_sum

# Embeddings: pairs against the rest of the batch, a teacher's margins, ordered scores
from bert_recipe.model.loss import contrastive_losses, cosent_losses, margin_mse_losses
