"""weft.h for ctypes: constants, structs, and of each function its result and its parameters. Made from the
headers by `tools/c_api.py --write`; the test house/c_api compares it with them."""
from ctypes import (CFUNCTYPE, POINTER, Structure, c_bool, c_char, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32,
                    c_uint64, c_void_p, sizeof)

CPU = 0
EVERY_RANK = -1
ANY_SOURCE = -2147483648
NO_CALL = 18446744073709551615
ERROR_RANKS = 16
ERROR_TEXT = 1024
EXACT = -1.0
TRAITS_REDUCE_OPS = 32
MAX_DIMS = 8
VERSION_MAJOR = 0
VERSION_MINOR = 2
VERSION_PATCH = 0
F64 = 0
F32 = 1
F16 = 2
BF16 = 3
I8 = 4
I16 = 5
I32 = 6
I64 = 7
U8 = 8
U16 = 9
U32 = 10
U64 = 11
BOOL = 12
F8E4M3 = 13
F8E5M2 = 14
C64 = 15
C128 = 16
SUM = 0
AVG = 1
MIN = 2
MAX = 3
PROD = 4
PREMUL_SUM = 5
BIT_AND = 6
BIT_OR = 7
BIT_XOR = 8
LOGICAL_AND = 9
LOGICAL_OR = 10
LOGICAL_XOR = 11
USER = 12
ORDER_NATIVE = 0
ORDER_CANONICAL = 1
LOG_ERROR = 0
LOG_WARNING = 1
LOG_INFO = 2
LOG_DEBUG = 3
DL_CPU = 1
DL_CUDA = 2
DL_CUDA_HOST = 3
DL_CUDA_MANAGED = 13
DL_INT = 0
DL_UINT = 1
DL_FLOAT = 2
DL_BFLOAT = 4
DL_COMPLEX = 5
DL_BOOL = 6
DL_FLOAT8_E4M3FN = 10
DL_FLOAT8_E5M2 = 12
DL_READ_ONLY = 1
DL_IS_COPIED = 2
OK = 0
BAD_ARGUMENT = 1
LAYOUT = 2
UNSUPPORTED = 3
MISMATCH = 4
TIMEOUT = 5
PEER_LOST = 6
ABORTED = 7
SYSTEM = 8
CORRUPT = 9
OP_NONE = 0
OP_ALL_REDUCE = 1
OP_REDUCE = 2
OP_BROADCAST = 3
OP_ALL_GATHER = 4
OP_ALL_GATHER_V = 5
OP_REDUCE_SCATTER = 6
OP_REDUCE_SCATTER_V = 7
OP_GATHER = 8
OP_SCATTER = 9
OP_ALL_TO_ALL = 10
OP_ALL_TO_ALL_V = 11
OP_BARRIER = 12
OP_SEND = 13
OP_RECV = 14
OP_SCAN = 15
OP_EXSCAN = 16
OP_WAIT_MESSAGE = 17
OP_EXCHANGE = 18
EXCHANGE_COPY = 0
EXCHANGE_ADD = 1
DRIFT_ERROR = 0
DRIFT_AVERAGE = 1
NON_FINITE_ERROR = 0
NON_FINITE_SKIP = 1
UNUSED_ERROR = 0
UNUSED_ZEROS = 1
BUCKETS_AS_THEY_ARE = 0
BUCKETS_BF16 = 1
PROGRESS_CALLER = 0
PROGRESS_THREAD = 1
PROGRESS_POLLED = 0
PROGRESS_THREADED = 1
PROGRESS_STREAM = 2
REPLICATE = 0
SHARD = 1
PARTIAL = 2
EDGE_NONE = 0
EDGE_ZERO = 1
EDGE_CONSTANT = 2
EDGE_PERIODIC = 3
EDGE_REFLECT = 4
EDGE_REPLICATE = 5
EDGE_POLE = 6
weft_combine = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int32)
weft_broadcast_fn = CFUNCTYPE(c_int32, c_void_p, c_void_p, c_size_t)


class weft_buffer(Structure):
    _fields_ = [("data", c_void_p), ("count", c_int64), ("dtype", c_int32), ("device", c_int32)]


class weft_blocks(Structure):
    _fields_ = [("counts", POINTER(c_int64)), ("offsets", POINTER(c_int64)), ("size", c_int64)]


class weft_stream(Structure):
    _fields_ = [("device", c_int32), ("handle", c_void_p)]


class weft_checkpoint_string(Structure):
    _fields_ = [("key", c_char_p), ("value", c_char_p)]


class weft_checkpoint_save_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("keep", c_int32), ("on_stage", CFUNCTYPE(None, c_void_p, c_char_p)), ("data", c_void_p)]


class weft_checkpoint_load_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("may_leave", CFUNCTYPE(c_bool, c_void_p, c_char_p)), ("data", c_void_p)]


class weft_checkpoint_tensor(Structure):
    _fields_ = [("name", c_char_p), ("dtype", c_int32), ("dim_count", c_int32), ("extents", c_int64 * MAX_DIMS), ("count", c_int64)]


class weft_checkpoint_export_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("rename", CFUNCTYPE(c_char_p, c_void_p, c_char_p)), ("data", c_void_p)]


class weft_checkpoint_convert_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("files", c_int32), ("rename", CFUNCTYPE(c_char_p, c_void_p, c_char_p)),
    ("dtype", CFUNCTYPE(c_int32, c_void_p, c_char_p, c_int32)), ("data", c_void_p), ("old_names", c_bool)]


class weft_message(Structure):
    _fields_ = [("source", c_int32), ("tag", c_int32), ("count", c_int64), ("dtype", c_int32)]


class weft_allocator(Structure):
    _fields_ = [("allocate", CFUNCTYPE(c_void_p, c_void_p, c_size_t, c_size_t)),
    ("deallocate", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t, c_size_t)), ("data", c_void_p)]


class weft_dl_device(Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


class weft_dl_data_type(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class weft_dl_version(Structure):
    _fields_ = [("major", c_uint32), ("minor", c_uint32)]


class weft_error(Structure):
    _fields_ = [("struct_size", c_uint32), ("code", c_int32), ("op", c_int32), ("rank_count", c_int32), ("call", c_uint64),
    ("ranks", c_int32 * ERROR_RANKS), ("quiesced", c_bool), ("text", c_char * ERROR_TEXT)]


class weft_exchange_box(Structure):
    _fields_ = [("field", c_int32), ("dim_count", c_int32), ("offset", c_int64), ("counts", POINTER(c_int64)), ("strides", POINTER(c_int64)),
    ("indices", POINTER(c_int64))]


class weft_reduce_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("on_drift", c_int32), ("tolerance", c_double), ("data_axes", c_void_p)]


class weft_sync_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("on_drift", c_int32), ("tolerance", c_double)]


class weft_clip_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("non_finite", c_int32), ("p", c_double)]


class weft_reducer_entry(Structure):
    _fields_ = [("name", c_char_p), ("count", c_int64), ("dtype", c_int32), ("op", c_int32)]


class weft_group_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("backend", c_char_p), ("name", c_char_p), ("deadline_ns", c_int64), ("progress", c_int32),
    ("process_rank", c_int32), ("order", c_int32)]


class weft_traits(Structure):
    _fields_ = [("struct_size", c_uint32), ("progress_style", c_int32), ("ops", c_uint64), ("dtypes", c_uint64),
    ("reduces", c_uint64 * TRAITS_REDUCE_OPS), ("device", c_int32), ("native_is_canonical", c_bool), ("spin", c_bool), ("rings", c_bool),
    ("deadline", c_bool), ("names_absent", c_bool), ("detects_death", c_bool), ("survives_death", c_bool), ("checks_calls", c_bool),
    ("revocable", c_bool), ("quiesces", c_bool)]


class weft_placement(Structure):
    _fields_ = [("kind", c_int32), ("dim", c_int32), ("op", c_int32)]


class weft_mesh_axis(Structure):
    _fields_ = [("name", c_char_p), ("size", c_int32)]


class weft_shard_entry(Structure):
    _fields_ = [("name", c_char_p), ("layout", c_void_p), ("dtype", c_int32)]


class weft_sharded_parameters_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("reduce", c_int32), ("gradient", c_int32), ("alone_bytes", c_int64), ("replicate", c_void_p)]


class weft_store_server_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("port", c_int32), ("host", c_char_p), ("secret", c_char_p), ("linger_ns", c_int64),
    ("max_clients", c_int64), ("max_unauthenticated", c_int64), ("join_limit_ns", c_int64), ("max_keys", c_int64), ("max_bytes", c_int64),
    ("max_unanswered", c_int64)]


class weft_channel_init(Structure):
    _fields_ = [("struct_size", c_uint32), ("rank", c_int32), ("size", c_int32), ("group", c_char_p), ("token", c_char_p),
    ("transport_ranks", POINTER(c_int32)), ("limit_ns", c_int64)]


class weft_edge(Structure):
    _fields_ = [("kind", c_int32), ("longitude", c_int32), ("value", c_double)]


class weft_cut(Structure):
    _fields_ = [("dim", c_int32), ("part_count", c_int32), ("begins", POINTER(c_int64))]


class weft_range(Structure):
    _fields_ = [("lo", c_int64), ("hi", c_int64)]


class weft_context_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("log_level", c_int32), ("log", CFUNCTYPE(None, c_void_p, c_int32, c_char_p)), ("log_data", c_void_p),
    ("log_levels", c_char_p), ("allocator", weft_allocator), ("segment_bytes", c_size_t)]


class weft_dl_tensor(Structure):
    _fields_ = [("data", c_void_p), ("device", weft_dl_device), ("ndim", c_int32), ("dtype", weft_dl_data_type), ("shape", POINTER(c_int64)),
    ("strides", POINTER(c_int64)), ("byte_offset", c_uint64)]


class weft_exchange_part(Structure):
    _fields_ = [("peer", c_int32), ("box_count", c_int32), ("boxes", POINTER(weft_exchange_box))]


class weft_ready_bucket(Structure):
    _fields_ = [("data", weft_buffer), ("members", POINTER(c_int32)), ("member_count", c_int32), ("number", c_int32), ("op", c_int32)]


class weft_axis_placement(Structure):
    _fields_ = [("axis", c_char_p), ("placement", weft_placement)]


class weft_tensor(Structure):
    _fields_ = [("name", c_char_p), ("data", weft_buffer), ("layout", c_void_p), ("extents", POINTER(c_int64)), ("dim_count", c_int32)]


class weft_transport(Structure):
    _fields_ = [("struct_size", c_uint32), ("detects_death", c_bool), ("spin", c_bool), ("name", c_char_p), ("transport_data", c_void_p),
    ("open", CFUNCTYPE(c_int32, c_void_p, POINTER(weft_channel_init), POINTER(c_void_p), POINTER(weft_error))),
    ("write", CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p, c_size_t, POINTER(c_size_t), POINTER(weft_error))),
    ("read", CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p, c_size_t, POINTER(c_size_t), POINTER(weft_error))),
    ("close", CFUNCTYPE(None, c_void_p))]


class weft_halo_dim(Structure):
    _fields_ = [("dim", c_int32), ("reserved", c_int32), ("before", c_int64), ("after", c_int64), ("before_edge", weft_edge),
    ("after_edge", weft_edge)]


class weft_halo_fields(Structure):
    _fields_ = [("halo", c_void_p), ("fields", POINTER(weft_buffer)), ("field_count", c_int32), ("reserved", c_int32)]


class weft_window_dim(Structure):
    _fields_ = [("dim", c_int32), ("part_count", c_int32), ("wanted", POINTER(weft_range)), ("before_edge", weft_edge), ("after_edge", weft_edge)]


class weft_window_fields(Structure):
    _fields_ = [("window", c_void_p), ("in_", POINTER(weft_buffer)), ("out", POINTER(weft_buffer)), ("field_count", c_int32),
    ("reserved", c_int32)]


class weft_call_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("reduce_op", c_int32), ("order", c_int32), ("scale", c_double), ("deadline_ns", c_int64),
    ("tag", c_int32), ("reserved", c_int32), ("stream", weft_stream), ("reduction", c_void_p)]


class weft_call(Structure):
    _fields_ = [("struct_size", c_uint32), ("op", c_int32), ("in_", weft_buffer), ("out", weft_buffer), ("root", c_int32), ("peer", c_int32),
    ("in_blocks", weft_blocks), ("out_blocks", weft_blocks), ("options", POINTER(weft_call_options))]


class weft_dl_managed_tensor(Structure):
    pass


weft_dl_managed_tensor._fields_ = [("dl_tensor", weft_dl_tensor), ("manager_ctx", c_void_p),
    ("deleter", CFUNCTYPE(None, POINTER(weft_dl_managed_tensor)))]


class weft_dl_managed_tensor_versioned(Structure):
    pass


weft_dl_managed_tensor_versioned._fields_ = [("version", weft_dl_version), ("manager_ctx", c_void_p),
    ("deleter", CFUNCTYPE(None, POINTER(weft_dl_managed_tensor_versioned))), ("flags", c_uint64), ("dl_tensor", weft_dl_tensor)]


class weft_exchange_plan(Structure):
    _fields_ = [("struct_size", c_uint32), ("kind", c_int32), ("field_count", c_int32), ("send_count", c_int32), ("receive_count", c_int32),
    ("reserved", c_int32), ("fields", POINTER(c_int32)), ("sends", POINTER(weft_exchange_part)), ("receives", POINTER(weft_exchange_part)),
    ("name", c_char_p)]


class weft_bucket_hook(Structure):
    _fields_ = [("name", c_char_p), ("begin", CFUNCTYPE(c_int32, c_void_p, POINTER(weft_ready_bucket), POINTER(weft_error))),
    ("end", CFUNCTYPE(c_int32, c_void_p, POINTER(weft_ready_bucket), POINTER(weft_error))), ("data", c_void_p)]


class weft_reducer_options(Structure):
    _fields_ = [("struct_size", c_uint32), ("unused", c_int32), ("bucket_bytes", c_int64), ("hook", weft_bucket_hook), ("compression", c_int32)]


weft_whole_function = CFUNCTYPE(c_bool, c_void_p, c_char_p, POINTER(weft_buffer))
weft_work_callback = CFUNCTYPE(None, c_void_p, POINTER(weft_error))

# The fields that the initialisers of weft.h set to something else than zero.
INITIAL = {
    weft_checkpoint_save_options: {},
    weft_checkpoint_load_options: {},
    weft_checkpoint_export_options: {},
    weft_checkpoint_convert_options: {},
    weft_call: {"in_.dtype": 1, "out.dtype": 1, "root": -1, "peer": -1},
    weft_context_options: {"log_level": 1},
    weft_error: {"call": 18446744073709551615, "quiesced": True},
    weft_exchange_plan: {},
    weft_reduce_options: {},
    weft_sync_options: {},
    weft_clip_options: {},
    weft_reducer_options: {},
    weft_group_options: {"process_rank": -1},
    weft_traits: {},
    weft_sharded_parameters_options: {"reduce": 1, "gradient": 1},
    weft_store_server_options: {},
    weft_transport: {},
    weft_call_options: {},
}

# name: (result, parameters)
FUNCTIONS = {
    "weft_dtype_size": (c_int64, (c_int32,)),
    "weft_dtype_name": (c_char_p, (c_int32,)),
    "weft_dtype_from_name": (c_int32, (c_char_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_reduce_op_name": (c_char_p, (c_int32,)),
    "weft_buffer_overlap": (c_int32, (POINTER(weft_buffer), POINTER(weft_buffer), POINTER(c_bool), POINTER(weft_error),)),
    "weft_reduction_create": (c_int32, (c_char_p, weft_combine, c_void_p, CFUNCTYPE(None, c_void_p), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_reduction_destroy": (None, (c_void_p,)),
    "weft_callbacks_end": (c_int32, (c_int64, POINTER(weft_error),)),
    "weft_callbacks_begin": (c_int32, (POINTER(weft_error),)),
    "weft_checkpoint_save": (c_int32, (c_char_p, c_void_p, c_int64, POINTER(weft_tensor), c_int32, POINTER(weft_checkpoint_string), c_int32,
    POINTER(weft_checkpoint_save_options), POINTER(weft_error),)),
    "weft_checkpoint_load": (c_int32, (c_char_p, c_void_p, POINTER(weft_tensor), c_int32, POINTER(weft_checkpoint_load_options), POINTER(c_int64),
    POINTER(c_void_p), POINTER(weft_error),)),
    "weft_checkpoint_saver_create": (c_int32, (c_void_p, c_bool, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_checkpoint_saver_destroy": (None, (c_void_p,)),
    "weft_checkpoint_saver_save": (c_int32, (c_void_p, c_char_p, c_int64, POINTER(weft_tensor), c_int32, POINTER(weft_checkpoint_string), c_int32,
    POINTER(weft_checkpoint_save_options), POINTER(c_bool), POINTER(weft_error),)),
    "weft_checkpoint_saver_wait": (c_int32, (c_void_p, POINTER(weft_error),)),
    "weft_gather_full_state": (c_int32, (c_void_p, POINTER(weft_tensor), c_int32, c_int32, weft_whole_function, c_void_p, POINTER(weft_error),)),
    "weft_set_full_state": (c_int32, (c_void_p, POINTER(weft_tensor), c_int32, c_int32, weft_whole_function, c_void_p, POINTER(weft_error),)),
    "weft_checkpoint_latest": (c_int32, (c_char_p, POINTER(c_void_p), POINTER(c_int64), POINTER(weft_error),)),
    "weft_checkpoint_reader_open": (c_int32, (c_char_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_checkpoint_reader_destroy": (None, (c_void_p,)),
    "weft_checkpoint_reader_step": (c_int32, (c_void_p, POINTER(c_int64), POINTER(weft_error),)),
    "weft_checkpoint_reader_folder": (c_int32, (c_void_p, POINTER(c_char_p), POINTER(weft_error),)),
    "weft_checkpoint_reader_mesh": (c_int32, (c_void_p, POINTER(c_char_p), POINTER(weft_error),)),
    "weft_checkpoint_reader_hashed": (c_int32, (c_void_p, POINTER(c_bool), POINTER(weft_error),)),
    "weft_checkpoint_reader_extra_count": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_checkpoint_reader_extra": (c_int32, (c_void_p, c_int32, POINTER(weft_checkpoint_string), POINTER(weft_error),)),
    "weft_checkpoint_reader_tensor_count": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_checkpoint_reader_tensor": (c_int32, (c_void_p, c_int32, POINTER(weft_checkpoint_tensor), POINTER(weft_error),)),
    "weft_checkpoint_reader_find": (c_int32, (c_void_p, c_char_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_checkpoint_reader_read": (c_int32, (c_void_p, c_int32, POINTER(weft_buffer), POINTER(weft_error),)),
    "weft_checkpoint_verify": (c_int32, (c_char_p, CFUNCTYPE(None, c_void_p, c_int64, c_int64), c_void_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_checkpoint_export": (c_int32, (c_char_p, c_char_p, POINTER(weft_checkpoint_export_options), POINTER(c_int64), POINTER(weft_error),)),
    "weft_checkpoint_convert": (c_int32, (c_char_p, c_char_p, POINTER(weft_checkpoint_convert_options), POINTER(c_int64), POINTER(weft_error),)),
    "weft_all_reduce": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_call_options), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_reduce": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), c_int32, POINTER(weft_call_options), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_broadcast": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), c_int32, POINTER(weft_call_options), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_all_gather": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_call_options), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_all_gather_v": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_blocks), POINTER(weft_call_options),
    POINTER(c_void_p), POINTER(weft_error),)),
    "weft_reduce_scatter": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_call_options), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_reduce_scatter_v": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_blocks), POINTER(weft_call_options),
    POINTER(c_void_p), POINTER(weft_error),)),
    "weft_gather": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), c_int32, POINTER(weft_call_options), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_scatter": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), c_int32, POINTER(weft_call_options), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_all_to_all": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_call_options), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_all_to_all_v": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_blocks), POINTER(weft_blocks),
    POINTER(weft_call_options), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_scan": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_call_options), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_exscan": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_call_options), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_barrier": (c_int32, (c_void_p, POINTER(weft_call_options), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_send": (c_int32, (c_void_p, POINTER(weft_buffer), c_int32, POINTER(weft_call_options), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_recv": (c_int32, (c_void_p, POINTER(weft_buffer), c_int32, POINTER(weft_call_options), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_send_recv": (c_int32, (c_void_p, POINTER(weft_buffer), c_int32, POINTER(weft_buffer), c_int32, POINTER(weft_call_options),
    POINTER(c_void_p), POINTER(weft_error),)),
    "weft_probe": (c_int32, (c_void_p, c_int32, POINTER(weft_call_options), POINTER(c_bool), POINTER(weft_message), POINTER(weft_error),)),
    "weft_wait_message": (c_int32, (c_void_p, c_int32, POINTER(weft_call_options), POINTER(weft_message), POINTER(weft_error),)),
    "weft_submit": (c_int32, (c_void_p, POINTER(weft_call), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_persistent_create": (c_int32, (c_void_p, POINTER(weft_call), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_persistent_start": (c_int32, (c_void_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_persistent_start_all": (c_int32, (POINTER(c_void_p), c_size_t, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_persistent_destroy": (None, (c_void_p,)),
    "weft_coalesced": (c_int32, (c_void_p, POINTER(weft_call), c_size_t, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_min_loc": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_buffer),
    POINTER(weft_call_options), POINTER(weft_error),)),
    "weft_max_loc": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_buffer), POINTER(weft_buffer),
    POINTER(weft_call_options), POINTER(weft_error),)),
    "weft_context_create": (c_int32, (POINTER(weft_context_options), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_context_destroy": (None, (c_void_p,)),
    "weft_alloc": (c_int32, (c_void_p, c_size_t, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_free": (c_int32, (c_void_p, c_void_p, POINTER(weft_error),)),
    "weft_buffer_from_dltensor": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_error),)),
    "weft_buffer_from_dlpack": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_error),)),
    "weft_buffer_from_dlpack_versioned": (c_int32, (c_void_p, c_bool, POINTER(weft_buffer), POINTER(weft_error),)),
    "weft_alloc_dlpack": (c_int32, (c_void_p, c_int32, POINTER(c_int64), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_alloc_dlpack_versioned": (c_int32, (c_void_p, c_int32, POINTER(c_int64), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_version": (c_char_p, ()),
    "weft_version_number": (c_int32, ()),
    "weft_status_name": (c_char_p, (c_int32,)),
    "weft_op_name": (c_char_p, (c_int32,)),
    "weft_text_data": (c_void_p, (c_void_p,)),
    "weft_text_size": (c_size_t, (c_void_p,)),
    "weft_text_destroy": (None, (c_void_p,)),
    "weft_persistent_exchange_create": (c_int32, (c_void_p, POINTER(weft_exchange_plan), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_persistent_exchange_start": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), c_int32, POINTER(weft_call_options),
    POINTER(c_void_p), POINTER(weft_error),)),
    "weft_persistent_exchange_destroy": (None, (c_void_p,)),
    "weft_group_exchange": (c_int32, (c_void_p, POINTER(weft_exchange_plan), POINTER(weft_buffer), POINTER(weft_buffer), c_int32,
    POINTER(weft_call_options), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_reduce_gradients": (c_int32, (POINTER(weft_tensor), c_int32, c_void_p, POINTER(weft_reduce_options), POINTER(weft_error),)),
    "weft_average_gradients": (c_int32, (POINTER(weft_tensor), c_int32, c_void_p, POINTER(weft_error),)),
    "weft_sync_replicated_gradients": (c_int32, (POINTER(weft_tensor), c_int32, c_void_p, POINTER(weft_sync_options), POINTER(weft_error),)),
    "weft_grad_norm": (c_int32, (POINTER(weft_tensor), c_int32, c_double, POINTER(c_double), POINTER(weft_error),)),
    "weft_clip_grad_norm": (c_int32, (POINTER(weft_tensor), c_int32, c_double, POINTER(weft_clip_options), POINTER(c_double), POINTER(weft_error),)),
    "weft_reducer_create": (c_int32, (c_void_p, POINTER(weft_reducer_entry), c_int32, POINTER(weft_reducer_options), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_reducer_destroy": (None, (c_void_p,)),
    "weft_reducer_slot": (c_int32, (c_void_p, c_int32, POINTER(weft_buffer), POINTER(weft_error),)),
    "weft_reducer_bind": (c_int32, (c_void_p, c_int32, POINTER(weft_buffer), POINTER(weft_error),)),
    "weft_reducer_ready": (c_int32, (c_void_p, c_int32, POINTER(weft_error),)),
    "weft_reducer_is_ready": (c_int32, (c_void_p, c_int32, POINTER(c_bool), POINTER(weft_error),)),
    "weft_reducer_begin_no_sync": (c_int32, (c_void_p, POINTER(weft_error),)),
    "weft_reducer_end_no_sync": (c_int32, (c_void_p, POINTER(weft_error),)),
    "weft_reducer_finish": (c_int32, (c_void_p, POINTER(weft_error),)),
    "weft_reducer_bucket_count": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_reducer_bucket_bytes": (c_int32, (c_void_p, c_int32, POINTER(c_int64), POINTER(weft_error),)),
    "weft_reducer_sent_early": (c_int32, (c_void_p, POINTER(c_int64), POINTER(weft_error),)),
    "weft_sampler_create": (c_int32, (c_void_p, c_int64, c_int64, c_uint64, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_sampler_destroy": (None, (c_void_p,)),
    "weft_sampler_part": (c_int32, (c_void_p, POINTER(c_int64), POINTER(c_int64), POINTER(weft_error),)),
    "weft_sampler_batch": (c_int32, (c_void_p, c_int64, POINTER(c_int64), c_int64, POINTER(weft_error),)),
    "weft_group_from_env": (c_int32, (c_void_p, POINTER(weft_group_options), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_group_create": (c_int32, (c_void_p, c_void_p, c_int32, c_int32, POINTER(weft_group_options), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_group_create_tcp": (c_int32, (c_void_p, c_char_p, c_int32, c_char_p, c_int32, c_int32, POINTER(weft_group_options), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_group_create_by_broadcast": (c_int32, (c_void_p, c_char_p, c_int32, c_int32, weft_broadcast_fn, c_void_p, POINTER(weft_group_options),
    POINTER(c_void_p), POINTER(weft_error),)),
    "weft_group_leave": (c_int32, (c_void_p, c_int64, POINTER(weft_error),)),
    "weft_group_destroy": (None, (c_void_p,)),
    "weft_group_subgroup": (c_int32, (c_void_p, c_char_p, POINTER(c_int32), c_size_t, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_group_split": (c_int32, (c_void_p, c_int32, c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_group_split_by_host": (c_int32, (c_void_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_group_duplicate": (c_int32, (c_void_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_group_parent_rank": (c_int32, (c_void_p, c_int32, POINTER(c_int32), POINTER(weft_error),)),
    "weft_group_rank": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_group_size": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_group_local_rank": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_group_local_size": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_group_name": (c_int32, (c_void_p, POINTER(c_char_p), POINTER(weft_error),)),
    "weft_group_backend": (c_int32, (c_void_p, POINTER(c_char_p), POINTER(weft_error),)),
    "weft_group_traits": (c_int32, (c_void_p, POINTER(weft_traits), POINTER(weft_error),)),
    "weft_backend_traits": (c_int32, (c_void_p, c_char_p, POINTER(weft_traits), POINTER(weft_error),)),
    "weft_group_abort": (c_int32, (c_void_p, c_char_p, POINTER(weft_error),)),
    "weft_group_quiesce": (c_int32, (c_void_p, c_int64, POINTER(c_bool), POINTER(weft_error),)),
    "weft_group_shrink": (c_int32, (c_void_p, c_int64, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_interrupt_create": (c_int32, (POINTER(c_void_p), POINTER(weft_error),)),
    "weft_interrupt_destroy": (None, (c_void_p,)),
    "weft_interrupt_attach": (c_int32, (c_void_p, POINTER(weft_error),)),
    "weft_interrupt_raise": (c_int32, (c_void_p, POINTER(weft_error),)),
    "weft_layout_create": (c_int32, (c_void_p, POINTER(weft_axis_placement), c_int32, POINTER(c_int64), c_int32, POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_layout_destroy": (None, (c_void_p,)),
    "weft_layout_with": (c_int32, (c_void_p, c_void_p, POINTER(weft_placement), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_layout_with_extents": (c_int32, (c_void_p, POINTER(c_int64), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_layout_shard_inside": (c_int32, (c_void_p, c_void_p, c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_layout_nested": (c_int32, (c_void_p, POINTER(c_char_p), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_layout_segmented": (c_int32, (c_void_p, c_int32, POINTER(c_int64), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_layout_reshape": (c_int32, (c_void_p, POINTER(c_int64), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_layout_transpose": (c_int32, (c_void_p, POINTER(c_int32), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_layout_reduced": (c_int32, (c_void_p, c_void_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_layout_mesh": (c_int32, (c_void_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_layout_on": (c_int32, (c_void_p, c_void_p, POINTER(weft_placement), POINTER(weft_error),)),
    "weft_layout_dim_count": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_layout_extents": (c_int32, (c_void_p, POINTER(c_int64), c_int32, POINTER(weft_error),)),
    "weft_layout_local_extents": (c_int32, (c_void_p, c_int32, POINTER(c_int64), c_int32, POINTER(weft_error),)),
    "weft_layout_part_count": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_layout_part": (c_int32, (c_void_p, c_int32, c_int32, POINTER(c_int64), POINTER(c_int64), c_int32, POINTER(weft_error),)),
    "weft_layout_equal": (c_int32, (c_void_p, c_void_p, POINTER(c_bool), POINTER(weft_error),)),
    "weft_layout_text": (c_int32, (c_void_p, c_char_p, c_size_t, POINTER(c_size_t), POINTER(weft_error),)),
    "weft_redistribute": (c_int32, (POINTER(weft_buffer), c_void_p, POINTER(weft_buffer), c_void_p, POINTER(weft_stream), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_transfer_done": (c_int32, (c_void_p, POINTER(c_bool), POINTER(weft_error),)),
    "weft_transfer_finish": (c_int32, (c_void_p, POINTER(weft_error),)),
    "weft_transfer_destroy": (None, (c_void_p,)),
    "weft_check_replicas": (c_int32, (POINTER(weft_tensor), c_int32, c_void_p, POINTER(weft_error),)),
    "weft_mesh_create": (c_int32, (c_void_p, POINTER(weft_mesh_axis), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_mesh_create_arithmetic": (c_int32, (c_void_p, POINTER(weft_mesh_axis), c_int32, c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_mesh_destroy": (None, (c_void_p,)),
    "weft_mesh_along": (c_int32, (c_void_p, POINTER(c_char_p), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_mesh_flatten": (c_int32, (c_void_p, c_char_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_mesh_unflatten": (c_int32, (c_void_p, c_char_p, POINTER(weft_mesh_axis), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_mesh_root": (c_int32, (c_void_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_mesh_equal": (c_int32, (c_void_p, c_void_p, POINTER(c_bool), POINTER(weft_error),)),
    "weft_mesh_size": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_mesh_rank": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_mesh_axis_count": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_mesh_get_axis": (c_int32, (c_void_p, c_int32, POINTER(weft_mesh_axis), POINTER(weft_error),)),
    "weft_mesh_find_axis": (c_int32, (c_void_p, c_char_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_mesh_coordinate": (c_int32, (c_void_p, c_char_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_mesh_coordinates": (c_int32, (c_void_p, c_int32, POINTER(c_int32), c_int32, POINTER(weft_error),)),
    "weft_mesh_rank_at": (c_int32, (c_void_p, POINTER(c_int32), c_int32, POINTER(c_int32), POINTER(weft_error),)),
    "weft_mesh_ranks": (c_int32, (c_void_p, POINTER(c_int32), c_int32, POINTER(weft_error),)),
    "weft_mesh_group": (c_int32, (c_void_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_sharded_parameters_create": (c_int32, (c_void_p, POINTER(weft_shard_entry), c_int32, POINTER(weft_sharded_parameters_options),
    POINTER(c_void_p), POINTER(weft_error),)),
    "weft_sharded_parameters_destroy": (None, (c_void_p,)),
    "weft_sharded_parameters_layout": (c_int32, (c_void_p, c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_sharded_parameters_range": (c_int32, (c_void_p, c_int32, c_int32, c_int32, POINTER(c_int64), POINTER(c_int64), POINTER(c_int32),
    POINTER(weft_error),)),
    "weft_sharded_parameters_bytes": (c_int32, (c_void_p, POINTER(c_int64), POINTER(c_int64), POINTER(weft_error),)),
    "weft_sharded_parameters_unshard": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), c_int32, POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_sharded_parameters_reshard": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), c_int32, POINTER(weft_error),)),
    "weft_sharded_parameters_reduce_scatter": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), c_int32, c_int32, POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_store_create_local": (c_int32, (POINTER(c_void_p), POINTER(weft_error),)),
    "weft_store_create_file": (c_int32, (c_char_p, c_int64, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_store_create_tcp": (c_int32, (c_char_p, c_int32, c_char_p, c_int64, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_store_destroy": (None, (c_void_p,)),
    "weft_store_server_create": (c_int32, (c_void_p, POINTER(weft_store_server_options), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_store_server_port": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_store_server_address": (c_int32, (c_void_p, POINTER(c_char_p), POINTER(weft_error),)),
    "weft_store_server_destroy": (None, (c_void_p,)),
    "weft_store_secret_from_env": (c_int32, (POINTER(c_void_p), POINTER(weft_error),)),
    "weft_store_secret_create": (c_int32, (POINTER(c_void_p), POINTER(weft_error),)),
    "weft_store_set": (c_int32, (c_void_p, c_char_p, c_void_p, c_size_t, c_int64, POINTER(weft_error),)),
    "weft_store_get": (c_int32, (c_void_p, c_char_p, c_int64, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_store_try_get": (c_int32, (c_void_p, c_char_p, c_int64, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_store_add": (c_int32, (c_void_p, c_char_p, c_int64, c_int64, POINTER(c_int64), POINTER(weft_error),)),
    "weft_store_compare_set": (c_int32, (c_void_p, c_char_p, c_void_p, c_size_t, c_void_p, c_size_t, c_int64, POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_store_remove": (c_int32, (c_void_p, c_char_p, c_int64, POINTER(weft_error),)),
    "weft_group_trace_json": (c_int32, (c_void_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_group_trace_chrome": (c_int32, (c_void_p, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_group_create_over": (c_int32, (c_void_p, POINTER(weft_transport), c_void_p, c_int32, c_int32, POINTER(weft_group_options),
    POINTER(c_void_p), POINTER(weft_error),)),
    "weft_halo_create": (c_int32, (c_void_p, POINTER(weft_cut), c_int32, POINTER(weft_halo_dim), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_halo_destroy": (None, (c_void_p,)),
    "weft_halo_extents": (c_int32, (c_void_p, POINTER(c_int64), c_int32, POINTER(weft_error),)),
    "weft_halo_part": (c_int32, (c_void_p, POINTER(c_int64), POINTER(c_int64), POINTER(c_int64), c_int32, POINTER(weft_error),)),
    "weft_halo_start": (c_int32, (c_void_p, POINTER(weft_buffer), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_halo_start_add": (c_int32, (c_void_p, POINTER(weft_buffer), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_halo_start_together": (c_int32, (POINTER(weft_halo_fields), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_window_create": (c_int32, (c_void_p, POINTER(weft_cut), c_int32, POINTER(weft_window_dim), c_int32, POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_window_destroy": (None, (c_void_p,)),
    "weft_window_extents": (c_int32, (c_void_p, POINTER(c_int64), POINTER(c_int64), c_int32, POINTER(weft_error),)),
    "weft_window_own": (c_int32, (c_void_p, c_int32, POINTER(weft_range), POINTER(weft_error),)),
    "weft_window_start": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), c_int32, POINTER(weft_stream), POINTER(c_void_p),
    POINTER(weft_error),)),
    "weft_window_start_together": (c_int32, (POINTER(weft_window_fields), c_int32, POINTER(weft_stream), POINTER(c_void_p), POINTER(weft_error),)),
    "weft_window_start_adjoint": (c_int32, (c_void_p, POINTER(weft_buffer), POINTER(weft_buffer), c_int32, POINTER(c_void_p), POINTER(weft_error),)),
    "weft_exchange_done": (c_int32, (c_void_p, POINTER(c_bool), POINTER(weft_error),)),
    "weft_exchange_finish": (c_int32, (c_void_p, POINTER(weft_error),)),
    "weft_exchange_destroy": (None, (c_void_p,)),
    "weft_work_wait": (c_int32, (c_void_p, POINTER(weft_error),)),
    "weft_work_wait_for": (c_int32, (c_void_p, c_int64, POINTER(c_bool), POINTER(weft_error),)),
    "weft_work_done": (c_int32, (c_void_p, POINTER(c_bool), POINTER(weft_error),)),
    "weft_work_wait_all": (c_int32, (POINTER(c_void_p), c_size_t, POINTER(weft_error),)),
    "weft_work_wait_all_for": (c_int32, (POINTER(c_void_p), c_size_t, c_int64, POINTER(c_bool), POINTER(weft_error),)),
    "weft_work_wait_on": (c_int32, (c_void_p, weft_stream, POINTER(weft_error),)),
    "weft_work_source": (c_int32, (c_void_p, POINTER(c_int32), POINTER(weft_error),)),
    "weft_work_sources": (c_int32, (c_void_p, POINTER(c_int32), c_size_t, POINTER(c_size_t), POINTER(weft_error),)),
    "weft_work_then": (c_int32, (c_void_p, weft_work_callback, c_void_p, POINTER(weft_error),)),
    "weft_work_destroy": (None, (c_void_p,)),
}


def make(kind, initial=None):
    """A struct as its initialiser in weft.h makes it; initial: the INITIAL of another header."""
    made = kind()
    if hasattr(made, "struct_size"):
        made.struct_size = sizeof(kind)
    for name, value in (INITIAL if initial is None else initial).get(kind, {}).items():
        *path, last = name.split(".")
        inner = made
        for step in path:
            inner = getattr(inner, step)
        setattr(inner, last, value)
    return made
