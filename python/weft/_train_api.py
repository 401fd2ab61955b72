"""weft_train.h for ctypes, as weft/_api.py has weft.h. Made from the headers by `tools/c_api.py --write`; the
test house/c_api compares it with them."""
from ctypes import CFUNCTYPE, POINTER, Structure, c_bool, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p

from ._api import MAX_DIMS, weft_buffer, weft_error, weft_tensor

IGNORED = -100
ROUTER_SOFTMAX = 0
ROUTER_SIGMOID = 1
ROUTER_BIAS_NONE = 0
ROUTER_BIAS_SELECTS = 1
ROUTER_BIAS_WEIGHS = 2
EXPERT_SWIGLU = 0
EXPERT_SILU = 1
EXPERT_GELU = 2
EXPERT_RELU = 3
SCALE_OF_TENSOR = 0
SCALE_OF_ROWS = 1
SCALE_OF_COLUMNS = 2
DATA_DDP = 0
DATA_FSDP = 1
FLOAT8_NONE = 0
FLOAT8_TENSORWISE = 1
FLOAT8_ROWWISE = 2
FLOAT8_ROWWISE_GW_HP = 3
AC_NONE = 0
AC_FULL = 1
AC_SELECTIVE = 2
RESHARD = 0
KEEP = -1
ADAMW = 0
SGD = 1
LION = 2
SCHEDULE_FREE_ADAMW = 3
MUON = 4
ENDED_STEPS = 0
ENDED_STOP = 1
ENDED_PATIENCE = 2
SCHEDULE_NONE = 0
SCHEDULE_CONSTANT = 1
SCHEDULE_LINEAR = 2
SCHEDULE_COSINE = 3
SCHEDULE_WSD = 4
SCHEDULE_REX = 5
DECAY_LINEAR = 0
DECAY_COSINE = 1
DECAY_ONE_MINUS_SQRT = 2


class weft_compute_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("threads", c_int32), ("device", c_int32)]


class weft_maps(Structure):
    _fields_ = [("data", c_void_p), ("shape", c_int64 * 4), ("dtype", c_int32), ("device", c_int32)]


class weft_conv2d_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("gather_output", c_bool), ("sequence_dim", c_int32)]


class weft_router_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("top_k", c_int32), ("scores", c_int32), ("bias", c_int32), ("normalise", c_bool)]


class weft_matrix(Structure):
    _fields_ = [("data", c_void_p), ("rows", c_int64), ("columns", c_int64), ("dtype", c_int32), ("device", c_int32)]


class weft_linear_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("gather_output", c_bool), ("divide_sequence", c_bool), ("batch", c_int64)]


class weft_element_loss_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("count", c_int64), ("scale", c_double)]


class weft_loss_scaler_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("scale", c_double), ("growth", c_double), ("backoff", c_double), ("interval", c_int64),
    ("least", c_double)]


class weft_transformer_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("weights", c_int32), ("dim", c_int64), ("layers", c_int64), ("heads", c_int64), ("kv_heads", c_int64),
    ("ffn_hidden", c_int64), ("vocab", c_int64), ("max_seq", c_int64), ("head_size", c_int64), ("rope_theta", c_double), ("norm_eps", c_double),
    ("init_std", c_double), ("seed", c_uint64), ("data_axis", c_char_p), ("tensor_axis", c_char_p), ("frozen", POINTER(c_char_p)),
    ("frozen_count", c_int32), ("tied", c_bool), ("sequence_parallel", c_bool), ("split_vocab", c_bool), ("data_form", c_int32),
    ("replicate_axis", c_char_p), ("reduce", c_int32), ("after_forward", c_int32), ("float8", c_int32), ("float8_whole_scales", c_bool),
    ("ac_mode", c_int32), ("ac_every", c_int32), ("ac_modules", POINTER(c_char_p)), ("ac_module_count", c_int32), ("exact", c_bool),
    ("activations", c_int32)]


class weft_parameter(Structure):
    _fields_ = [("struct_size", c_uint32), ("dim_count", c_int32), ("name", c_char_p), ("extents", c_int64 * MAX_DIMS),
    ("local_extents", c_int64 * MAX_DIMS), ("value", weft_buffer), ("trained", c_bool)]


class weft_token_batch(Structure):
    _fields_ = [("tokens", POINTER(c_int64)), ("labels", POINTER(c_int64)), ("rows", c_int64), ("sequence", c_int64), ("global_rows", c_int64)]


class weft_batch(Structure):
    _fields_ = [("inputs", POINTER(weft_tensor)), ("input_count", c_int32), ("target_count", c_int32), ("targets", POINTER(weft_tensor)),
    ("global_rows", c_int64)]


class weft_expert_balance(Structure):
    _fields_ = [("struct_size", c_uint32), ("expert_count", c_int32), ("path", c_char_p), ("counts", POINTER(c_int64)), ("tokens", c_int64),
    ("assignments", c_int64), ("dropped", c_int64), ("aux_loss", c_double), ("z_loss", c_double)]


class weft_tokens(Structure):
    _fields_ = [("tokens", POINTER(c_int64)), ("count", c_int64)]


class weft_module_parameter(Structure):
    _fields_ = [("name", c_char_p), ("extents", c_int64 * MAX_DIMS), ("dim_count", c_int32), ("split_dim", c_int32), ("mean", c_double),
    ("std", c_double)]


class weft_module_pass(Structure):
    _fields_ = [("struct_size", c_uint32), ("training", c_bool), ("backward", c_bool), ("input_count", c_int32), ("inputs", POINTER(weft_tensor)),
    ("parameters", POINTER(weft_tensor)), ("parameter_count", c_int32), ("output_count", c_int32), ("seed", c_uint64), ("step", c_int64),
    ("micro_batch", c_int64), ("gradients", POINTER(weft_tensor)), ("input_gradients", POINTER(weft_tensor)),
    ("parameter_gradients", POINTER(weft_tensor)), ("kept", POINTER(weft_tensor)), ("kept_count", c_int32), ("state", c_void_p)]


class weft_parameter_group(Structure):
    _fields_ = [("patterns", POINTER(c_char_p)), ("pattern_count", c_int32), ("rate", c_double), ("weight_decay", c_double)]


class weft_step_result(Structure):
    _fields_ = [("struct_size", c_uint32), ("skipped", c_bool), ("step", c_int64), ("tokens", c_int64), ("loss", c_double),
    ("grad_norm", c_double), ("loss_scale", c_double)]


class weft_evaluation(Structure):
    _fields_ = [("struct_size", c_uint32), ("tokens", c_int64), ("loss", c_double), ("perplexity", c_double)]


class weft_training_end(Structure):
    _fields_ = [("struct_size", c_uint32), ("why", c_int32), ("steps", c_int64), ("reason", c_int32), ("evaluated", c_bool),
    ("best_loss", c_double)]


class weft_schedule(Structure):
    _fields_ = [("struct_size", c_uint32), ("form", c_int32), ("peak", c_double), ("floor", c_double), ("warmup", c_int64), ("total", c_int64),
    ("decay", c_int64), ("shape", c_int32)]


class weft_vocab_loss_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("vocab", c_int64), ("valid", c_int64), ("label_smoothing", c_double), ("scale", c_double),
    ("z_loss", c_double)]


class weft_expert_matrices(Structure):
    _fields_ = [("struct_size", c_uint32), ("kind", c_int32), ("experts", c_int64), ("gate", POINTER(weft_matrix)), ("up", POINTER(weft_matrix)),
    ("down", POINTER(weft_matrix))]


class weft_expert_activations(Structure):
    _fields_ = [("struct_size", c_uint32), ("gate", POINTER(weft_matrix)), ("up", POINTER(weft_matrix)), ("hidden", POINTER(weft_matrix))]


class weft_generate_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("no_cache", c_bool), ("new_tokens", c_int64), ("top_k", c_int64), ("temperature", c_double),
    ("top_p", c_double), ("seed", c_uint64), ("stops", POINTER(weft_tokens)), ("stop_count", c_int32)]


class weft_module(Structure):
    _fields_ = [("name", c_char_p), ("parameters", POINTER(weft_module_parameter)), ("parameter_count", c_int32), ("user", c_void_p),
    ("forward", CFUNCTYPE(c_int32, c_void_p, POINTER(weft_module_pass), POINTER(weft_error))),
    ("backward", CFUNCTYPE(c_int32, c_void_p, POINTER(weft_module_pass), POINTER(weft_error))), ("release", CFUNCTYPE(None, c_void_p))]


class weft_trainer_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("optimizer", c_int32), ("beta1", c_double), ("beta2", c_double), ("eps", c_double),
    ("weight_decay", c_double), ("momentum", c_double), ("max_norm", c_double), ("seed", c_uint64), ("skip_non_finite", c_bool),
    ("loss_scale", c_double), ("label_smoothing", c_double), ("ema_decay", c_double), ("ema_warm_up", c_bool), ("adamw_for", POINTER(c_char_p)),
    ("groups", POINTER(weft_parameter_group)), ("adamw_for_count", c_int32), ("group_count", c_int32), ("iterations", c_int32),
    ("without_nesterov", c_bool), ("original_scale", c_bool), ("z_loss", c_double), ("freeze", c_char_p)]


class weft_training_plan(Structure):
    _fields_ = [("struct_size", c_uint32), ("keep", c_int32), ("data", c_void_p), ("steps", c_int64),
    ("step", CFUNCTYPE(c_int32, c_void_p, c_int64, POINTER(weft_step_result), POINTER(weft_error))), ("evaluate_every", c_int64),
    ("evaluate", CFUNCTYPE(c_int32, c_void_p, POINTER(weft_evaluation), POINTER(weft_error))), ("patience", c_int64), ("least_gain", c_double),
    ("stop", CFUNCTYPE(c_int32, c_void_p, POINTER(c_int32), POINTER(weft_error))), ("folder", c_char_p), ("save_every", c_int64),
    ("save_seconds", c_double), ("not_at_end", c_bool), ("wait_for_saves", c_bool), ("no_replica_check", c_bool),
    ("on_begin", CFUNCTYPE(c_int32, c_void_p, POINTER(weft_error))),
    ("on_step", CFUNCTYPE(c_int32, c_void_p, POINTER(weft_step_result), POINTER(weft_error))),
    ("on_evaluation", CFUNCTYPE(c_int32, c_void_p, POINTER(weft_evaluation), POINTER(weft_error))),
    ("on_checkpoint", CFUNCTYPE(c_int32, c_void_p, c_int64, POINTER(weft_error))),
    ("on_end", CFUNCTYPE(c_int32, c_void_p, POINTER(weft_training_end), POINTER(weft_error)))]



# The fields that the initialisers of weft.h set to something else than zero.
INITIAL = {
    weft_compute_options: {"threads": 1},
    weft_conv2d_options: {"sequence_dim": -1},
    weft_router_options: {"top_k": 2, "normalise": True},
    weft_expert_matrices: {},
    weft_expert_activations: {},
    weft_linear_options: {"batch": 1},
    weft_element_loss_options: {"scale": 1.0},
    weft_loss_scaler_options: {"scale": 65536, "growth": 2, "backoff": 0.5, "interval": 2000, "least": 6.103515625e-05},
    weft_transformer_options: {"weights": 1, "dim": 256, "layers": 4, "heads": 8, "kv_heads": 4, "ffn_hidden": 768, "vocab": 256, "max_seq": 512, "rope_theta": 10000.0, "norm_eps": 1e-05, "init_std": 0.02, "reduce": 1, "activations": 1},
    weft_parameter: {"value.dtype": 1},
    weft_expert_balance: {},
    weft_generate_options: {"new_tokens": 128, "temperature": 1, "top_p": 1},
    weft_module_parameter: {"split_dim": -1},
    weft_module: {},
    weft_trainer_options: {"beta1": 0.9, "beta2": 0.95, "eps": 1e-08, "weight_decay": 0.1, "max_norm": 1, "iterations": 5},
    weft_step_result: {},
    weft_evaluation: {},
    weft_training_end: {},
    weft_training_plan: {},
    weft_schedule: {"form": 3, "peak": 0.001, "total": 1},
    weft_vocab_loss_options: {"scale": 1.0},
}

# name: (result, parameters)
FUNCTIONS = {
    "weft_compute_create": (c_int32, (c_void_p, POINTER(weft_compute_options), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_compute_destroy": (None, (c_void_p,)),
    "weft_compute_threads": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_maps_from_dltensor": (c_int32, (c_void_p, POINTER(weft_maps), POINTER(weft_error),)),
    "weft_maps_from_dlpack": (c_int32, (c_void_p, POINTER(weft_maps), POINTER(weft_error),)),
    "weft_maps_from_dlpack_versioned": (c_int32, (c_void_p, c_bool, POINTER(weft_maps), POINTER(weft_error),)),
    "weft_column_conv2d_forward": (c_int32, (c_void_p, c_void_p, POINTER(weft_maps), POINTER(weft_maps), POINTER(weft_buffer), POINTER(weft_maps),
    POINTER(weft_conv2d_options), POINTER(weft_error),)),
    "weft_column_conv2d_backward": (c_int32, (c_void_p, c_void_p, POINTER(weft_maps), POINTER(weft_maps), POINTER(weft_maps), POINTER(weft_maps),
    POINTER(weft_maps), POINTER(weft_buffer), c_bool, POINTER(weft_conv2d_options), POINTER(weft_error),)),
    "weft_row_conv2d_forward": (c_int32, (c_void_p, c_void_p, POINTER(weft_maps), POINTER(weft_maps), POINTER(weft_buffer), POINTER(weft_maps),
    POINTER(weft_conv2d_options), POINTER(weft_error),)),
    "weft_row_conv2d_backward": (c_int32, (c_void_p, c_void_p, POINTER(weft_maps), POINTER(weft_maps), POINTER(weft_maps), POINTER(weft_maps),
    POINTER(weft_maps), POINTER(weft_buffer), c_bool, POINTER(weft_conv2d_options), POINTER(weft_error),)),
    "weft_route_tokens": (c_int32, (POINTER(weft_matrix), POINTER(weft_buffer), POINTER(weft_router_options), POINTER(weft_matrix),
    POINTER(weft_matrix), POINTER(weft_error),)),
    "weft_router_sums": (c_int32, (POINTER(weft_matrix), POINTER(weft_buffer), POINTER(weft_matrix), POINTER(weft_router_options),
    POINTER(weft_buffer), POINTER(weft_buffer), POINTER(c_double), POINTER(weft_error),)),
    "weft_route_tokens_backward": (c_int32, (POINTER(weft_matrix), POINTER(weft_buffer), POINTER(weft_matrix), POINTER(weft_matrix),
    POINTER(weft_matrix), POINTER(weft_router_options), POINTER(weft_buffer), c_double, c_double, POINTER(weft_matrix), POINTER(weft_buffer),
    POINTER(weft_error),)),
    "weft_token_routes_create": (c_int32, (c_void_p, c_void_p, POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_buffer), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_token_routes_destroy": (None, (c_void_p,)),
    "weft_token_routes_sizes": (c_int32, (c_void_p, POINTER(c_int64), POINTER(c_int64), POINTER(c_int64), POINTER(weft_error),)),
    "weft_token_routes_rows": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_error),)),
    "weft_dispatch_rows": (c_int32, (c_void_p, POINTER(weft_matrix), POINTER(weft_matrix), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_combine_rows": (c_int32, (c_void_p, POINTER(weft_matrix), POINTER(weft_matrix), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_weighted_sum": (c_int32, (c_void_p, POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_error),)),
    "weft_row_products": (c_int32, (c_void_p, POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_error),)),
    "weft_experts_forward": (c_int32, (c_void_p, POINTER(weft_matrix), POINTER(weft_buffer), POINTER(weft_expert_matrices),
    POINTER(weft_expert_activations), POINTER(weft_matrix), POINTER(weft_error),)),
    "weft_experts_backward": (c_int32, (c_void_p, POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_buffer), POINTER(weft_expert_matrices),
    POINTER(weft_expert_activations), POINTER(weft_matrix), POINTER(weft_error),)),
    "weft_experts_weight_gradients": (c_int32, (c_void_p, POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_buffer), c_int32,
    POINTER(weft_expert_activations), POINTER(weft_expert_matrices), c_bool, POINTER(weft_error),)),
    "weft_float8_amax": (c_int32, (c_void_p, POINTER(weft_matrix), c_int32, POINTER(weft_buffer), POINTER(weft_error),)),
    "weft_float8_scale": (c_int32, (c_float, c_int32, c_bool, POINTER(c_float), POINTER(weft_error),)),
    "weft_float8_quantise": (c_int32, (c_void_p, POINTER(weft_matrix), c_int32, POINTER(weft_buffer), POINTER(weft_matrix), POINTER(weft_error),)),
    "weft_float8_widen": (c_int32, (c_void_p, POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_error),)),
    "weft_matrix_from_dltensor": (c_int32, (c_void_p, POINTER(weft_matrix), POINTER(weft_error),)),
    "weft_matrix_from_dlpack": (c_int32, (c_void_p, POINTER(weft_matrix), POINTER(weft_error),)),
    "weft_matrix_from_dlpack_versioned": (c_int32, (c_void_p, c_bool, POINTER(weft_matrix), POINTER(weft_error),)),
    "weft_column_linear_forward": (c_int32, (c_void_p, c_void_p, POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_buffer),
    POINTER(weft_matrix), POINTER(weft_linear_options), POINTER(weft_error),)),
    "weft_column_linear_backward": (c_int32, (c_void_p, c_void_p, POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_matrix),
    POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_buffer), c_bool, POINTER(weft_linear_options), POINTER(weft_error),)),
    "weft_row_linear_forward": (c_int32, (c_void_p, c_void_p, POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_buffer),
    POINTER(weft_matrix), POINTER(weft_linear_options), POINTER(weft_error),)),
    "weft_row_linear_backward": (c_int32, (c_void_p, c_void_p, POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_matrix),
    POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_buffer), c_bool, POINTER(weft_linear_options), POINTER(weft_error),)),
    "weft_mean_squared_error": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_element_loss_options),
    POINTER(weft_buffer), POINTER(c_double), POINTER(weft_error),)),
    "weft_binary_cross_entropy": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_element_loss_options),
    POINTER(weft_buffer), POINTER(c_double), POINTER(weft_error),)),
    "weft_loss_scaler_create": (c_int32, (POINTER(weft_loss_scaler_options), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_loss_scaler_destroy": (None, (c_void_p,)),
    "weft_loss_scaler_scale": (c_int32, (c_void_p, POINTER(c_double), POINTER(weft_error),)),
    "weft_loss_scaler_unscale": (c_int32, (c_void_p, POINTER(weft_tensor), c_int32, c_void_p, c_void_p, POINTER(c_bool), POINTER(weft_error),)),
    "weft_loss_scaler_update": (c_int32, (c_void_p, POINTER(weft_error),)),
    "weft_loss_scaler_discard": (c_int32, (c_void_p, POINTER(weft_error),)),
    "weft_loss_scaler_state": (c_int32, (c_void_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_loss_scaler_set_state": (c_int32, (c_void_p, c_char_p, POINTER(weft_error),)),
    "weft_convert": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_error),)),
    "weft_transformer_create": (c_int32, (c_void_p, c_void_p, POINTER(weft_transformer_options), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_transformer_create_from_text": (c_int32, (c_void_p, c_void_p, c_char_p, POINTER(weft_transformer_options), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_model_create": (c_int32, (c_void_p, c_void_p, c_char_p, c_char_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_model_text": (c_int32, (c_void_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_model_destroy": (None, (c_void_p,)),
    "weft_model_parameter_count": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_model_get_parameter": (c_int32, (c_void_p, c_int32, POINTER(weft_parameter), POINTER(weft_error),)),
    "weft_model_find_parameter": (c_int32, (c_void_p, c_char_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_model_parameter_layout": (c_int32, (c_void_p, c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_model_set_parameter": (c_int32, (c_void_p, c_int32, POINTER(weft_buffer), POINTER(weft_error),)),
    "weft_model_set_parameter_from_dltensor": (c_int32, (c_void_p, c_int32, c_void_p, POINTER(weft_error),)),
    "weft_model_parameter_dlpack": (c_int32, (c_void_p, c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_model_parameter_dlpack_versioned": (c_int32, (c_void_p, c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_model_logits": (c_int32, (c_void_p, POINTER(weft_token_batch), POINTER(weft_buffer), POINTER(weft_error),)),
    "weft_model_forward": (c_int32, (c_void_p, POINTER(weft_batch), POINTER(c_int32), POINTER(weft_error),)),
    "weft_model_get_output": (c_int32, (c_void_p, c_int32, POINTER(weft_tensor), POINTER(weft_error),)),
    "weft_model_expert_balance": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_model_get_expert_balance": (c_int32, (c_void_p, c_int32, POINTER(weft_expert_balance), POINTER(weft_error),)),
    "weft_model_generate": (c_int32, (c_void_p, POINTER(weft_tokens), c_int32, POINTER(weft_generate_options), POINTER(c_int64), POINTER(c_int64),
    POINTER(weft_error),)),
    "weft_model_save": (c_int32, (c_void_p, c_char_p, c_int64, POINTER(weft_error),)),
    "weft_model_load": (c_int32, (c_void_p, c_char_p, POINTER(c_int64), POINTER(weft_error),)),
    "weft_model_init_from": (c_int32, (c_void_p, c_char_p, POINTER(c_char_p), c_int32, POINTER(c_char_p), c_int32, POINTER(c_int64),
    POINTER(weft_error),)),
    "weft_module_output": (c_int32, (POINTER(weft_module_pass), c_int32, POINTER(c_int64), POINTER(weft_tensor), POINTER(weft_error),)),
    "weft_module_keep": (c_int32, (POINTER(weft_module_pass), c_int32, POINTER(c_int64), POINTER(weft_tensor), POINTER(weft_error),)),
    "weft_model_create_with_modules": (c_int32, (c_void_p, c_void_p, c_char_p, c_char_p, POINTER(weft_module), c_int32, POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_trainer_create": (c_int32, (c_void_p, POINTER(weft_trainer_options), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_trainer_create_from_json": (c_int32, (c_void_p, c_char_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_trainer_destroy": (None, (c_void_p,)),
    "weft_trainer_step": (c_int32, (c_void_p, POINTER(weft_token_batch), c_int32, c_double, POINTER(weft_step_result), POINTER(weft_error),)),
    "weft_trainer_step_batches": (c_int32, (c_void_p, POINTER(weft_batch), c_int32, c_double, POINTER(weft_step_result), POINTER(weft_error),)),
    "weft_trainer_evaluate": (c_int32, (c_void_p, POINTER(weft_batch), c_int32, POINTER(weft_evaluation), POINTER(weft_error),)),
    "weft_trainer_backward": (c_int32, (c_void_p, POINTER(weft_token_batch), c_int32, POINTER(weft_step_result), POINTER(weft_error),)),
    "weft_trainer_backward_batches": (c_int32, (c_void_p, POINTER(weft_batch), c_int32, POINTER(weft_step_result), POINTER(weft_error),)),
    "weft_trainer_gradients": (c_int32, (c_void_p, POINTER(weft_tensor), c_int32, POINTER(c_int32), POINTER(weft_error),)),
    "weft_trainer_update": (c_int32, (c_void_p, c_double, POINTER(weft_step_result), POINTER(weft_error),)),
    "weft_trainer_discard": (c_int32, (c_void_p, POINTER(weft_error),)),
    "weft_trainer_steps": (c_int32, (c_void_p, POINTER(c_int64), POINTER(weft_error),)),
    "weft_trainer_swap_averages": (c_int32, (c_void_p, c_bool, POINTER(weft_error),)),
    "weft_trainer_swap_evaluation": (c_int32, (c_void_p, c_bool, POINTER(weft_error),)),
    "weft_trainer_save": (c_int32, (c_void_p, c_char_p, POINTER(weft_error),)),
    "weft_trainer_load": (c_int32, (c_void_p, c_char_p, POINTER(weft_error),)),
    "weft_trainer_train": (c_int32, (c_void_p, POINTER(weft_training_plan), POINTER(weft_training_end), POINTER(weft_error),)),
    "weft_cosine_rate": (c_int32, (c_double, c_double, c_int64, c_int64, c_int64, POINTER(c_double), POINTER(weft_error),)),
    "weft_schedule_rate": (c_int32, (POINTER(weft_schedule), c_int64, POINTER(c_double), POINTER(weft_error),)),
    "weft_vocab_embedding_forward": (c_int32, (c_void_p, c_void_p, c_int64, POINTER(weft_buffer), POINTER(weft_matrix), POINTER(weft_matrix),
    c_bool, POINTER(weft_error),)),
    "weft_vocab_embedding_backward": (c_int32, (c_void_p, c_void_p, c_int64, POINTER(weft_buffer), POINTER(weft_matrix), POINTER(weft_matrix),
    c_bool, POINTER(weft_error),)),
    "weft_vocab_cross_entropy": (c_int32, (c_void_p, c_void_p, POINTER(weft_matrix), POINTER(weft_buffer), POINTER(weft_vocab_loss_options),
    POINTER(weft_matrix), POINTER(c_double), POINTER(weft_error),)),
    "weft_vocab_linear_cross_entropy": (c_int32, (c_void_p, c_void_p, POINTER(weft_matrix), POINTER(weft_matrix), POINTER(weft_buffer),
    POINTER(weft_vocab_loss_options), c_int64, POINTER(weft_matrix), POINTER(weft_matrix), c_bool, POINTER(c_double), POINTER(weft_error),)),
}
