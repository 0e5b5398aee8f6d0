"""The import path of EasyLM's documentation; see `ed_elarge.easylm.jax_utils`."""

from ed_elarge.easylm.jax_utils import JaxRNG as JaxRNG
from ed_elarge.easylm.jax_utils import average_metrics as average_metrics
from ed_elarge.easylm.jax_utils import (
    cross_entropy_loss_and_accuracy as cross_entropy_loss_and_accuracy,
)
from ed_elarge.easylm.jax_utils import float_tensor_to_dtype as float_tensor_to_dtype
from ed_elarge.easylm.jax_utils import float_to_dtype as float_to_dtype
from ed_elarge.easylm.jax_utils import get_float_dtype_by_name as get_float_dtype_by_name
from ed_elarge.easylm.jax_utils import get_jax_mesh as get_jax_mesh
from ed_elarge.easylm.jax_utils import get_metrics as get_metrics
from ed_elarge.easylm.jax_utils import get_weight_decay_mask as get_weight_decay_mask
from ed_elarge.easylm.jax_utils import global_norm as global_norm
from ed_elarge.easylm.jax_utils import init_rng as init_rng
from ed_elarge.easylm.jax_utils import make_shard_and_gather_fns as make_shard_and_gather_fns
from ed_elarge.easylm.jax_utils import match_partition_rules as match_partition_rules
from ed_elarge.easylm.jax_utils import named_tree_map as named_tree_map
from ed_elarge.easylm.jax_utils import next_rng as next_rng
from ed_elarge.easylm.jax_utils import set_random_seed as set_random_seed
from ed_elarge.easylm.jax_utils import tree_apply as tree_apply
