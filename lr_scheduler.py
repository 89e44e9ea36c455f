"""The learning-rate schedules: pure functions of the number of completed updates.

    from lr_scheduler import ScheduleConfig, make_schedule

    config = ScheduleConfig(learning_rate=6e-3, warmup_proportion=0.2843)
    rate = make_schedule(config, total_steps=7038)
    rates = [rate(0), rate(2000), rate(7037)]

All lie in bert_recipe/optimization/lr_scheduler.py, their flags (--lr-decay, ...) in
bert_recipe/config/optimization.py. To add one: a function there, with its name in DECAYS.
"""

# Peak, warmup, shape and its options; and the schedule of such a config: update -> rate
from bert_recipe.config import ScheduleConfig
from bert_recipe.optimization.lr_scheduler import make_schedule

# Each below: (config, update, total, warmup) -> rate.
# NVIDIA's: a linear warmup, then a power of what is left; the default
from bert_recipe.optimization.lr_scheduler import poly

# DeepSpeed's bing_bert
from bert_recipe.optimization.lr_scheduler import warmup_exp_decay_exp

# ModernBERT's trapezoid
from bert_recipe.optimization.lr_scheduler import warmup_stable_decay

# BMTrain's
from bert_recipe.optimization.lr_scheduler import constant, cosine, exponential, linear, noam
