/* The good arguments of the test of bad arguments (made by tools/c_api.py), so that another one of the same
 * call is the only one that is wrong. A new type of argument gets a line here:
 *   good_<type>              of handles and structs: a pointer
 *   good_<name>              of every argument of that name
 *   good_<function>_<name>   of one argument
 *   null_<function>_<name>   it may be NULL
 *   any_<function>_<name>    of a number: it may be negative
 * Every call is refused and has no effect. */
#ifndef WEFT_TESTS_CAPI_BAD_ARGUMENTS_H
#define WEFT_TESTS_CAPI_BAD_ARGUMENTS_H

#include "support.h"

#include <stddef.h>
#include <unistd.h>
#if LIBRARY_weft_train
#include "weft/weft_train.h"
#endif

/* Outputs, of whatever type. */
static union {
  char bytes[4096];
  max_align_t aligned;
} room;
static weft_error raw_error;

/* The caller gets the fault. A number may be wrong for the layout of a tensor, too. */
#define REFUSES(call, words)                                                \
  do {                                                                      \
    weft_error error = WEFT_ERROR_INIT;                                     \
    const weft_status got = (call);                                         \
    const weft_status other = got == WEFT_LAYOUT ? got : WEFT_BAD_ARGUMENT; \
    check_error(__FILE__, __LINE__, got, &error, other, "*" words);         \
  } while (0)

/* The call must write this to stderr, and nothing else. */
static inline void begin_stderr(FILE* file, int* saved) {
  CHECK(file != NULL);
  fflush(stderr);
  *saved = dup(2);
  CHECK(*saved >= 0 && dup2(fileno(file), 2) == 2);
}
static inline void end_stderr(const char* source, int line, FILE* file, int saved, const char* words) {
  char said[512];
  fflush(stderr);
  CHECK(dup2(saved, 2) == 2 && close(saved) == 0);
  rewind(file);
  said[fread(said, 1, sizeof said - 1, file)] = 0;
  fclose(file);
  if (strcmp(said, words) == 0) return;
  fprintf(stderr, "%s:%d: said \"%s\"\n  expected \"%s\"\n", source, line, said, words);
  exit(1);
}
#define SAYS(call, words)                               \
  do {                                                  \
    FILE* const file = tmpfile();                       \
    int saved = -1;                                     \
    begin_stderr(file, &saved);                         \
    call;                                               \
    end_stderr(__FILE__, __LINE__, file, saved, words); \
  } while (0)

/* Memory that no handle has ever been in. */
static max_align_t no_handle[8];
static float memory[8], other_memory[8];
static int64_t good_shape[1] = {2};
#define good_count 1
#define good_axis_count 1
#define good_dim_count 1
#define good_part_count 1
#define good_placement_count 1
#define good_segment_count 1
#define good_room 8
#define good_ndim 1
#define good_size 1
#define good_step 0
#define good_index 0
#define good_name "f32"
#define good_why "no reason"
#define good_stream ((weft_stream){WEFT_CPU, NULL})

static weft_context* good_weft_context;
static weft_store* good_weft_store;
static weft_interrupt* good_weft_interrupt;
#define null_weft_interrupt_attach_interrupt 1
static weft_text* good_weft_text;
static weft_group* good_weft_group;
static weft_work* good_weft_work;
static weft_work* good_works[1];
static weft_reduction* good_weft_reduction;
static const weft_buffer* good_weft_buffer;
static const weft_blocks* good_weft_blocks;
static const weft_call* good_weft_call;
static const weft_call_options* good_weft_call_options; /* with a reduction */

static weft_mesh* good_weft_mesh;
static weft_layout* good_weft_layout;
static weft_transfer* good_weft_transfer;
static weft_halo* good_weft_halo;
static weft_window* good_weft_window;
static weft_exchange* good_weft_exchange;
static weft_persistent* good_weft_persistent;
static weft_persistent* good_calls[1];
static weft_persistent_exchange* good_weft_persistent_exchange;
static const int64_t exchanged[] = {1};
static const weft_exchange_box box_sent = {0, 1, 0, exchanged, NULL, NULL},
                               box_received = {0, 1, 1, exchanged, NULL, NULL};
static const weft_exchange_part part_sent = {0, 1, &box_sent}, part_received = {0, 1, &box_received};
static const weft_dtype exchange_fields[] = {WEFT_F32};
static const weft_exchange_plan exchange_plan =
                                    {sizeof exchange_plan, WEFT_EXCHANGE_COPY, 1,   1, 1, 0, exchange_fields,
                                     &part_sent,           &part_received,     NULL},
                                *const good_weft_exchange_plan = &exchange_plan;
static const int64_t cut_begins[] = {0, 2};
static const weft_cut cut = {0, 1, cut_begins}, *const good_weft_cut = &cut;
static const weft_halo_dim halo_dim = {0, 0, 1, 1, {WEFT_EDGE_ZERO, 0, 0}, {WEFT_EDGE_ZERO, 0, 0}},
                           *const good_weft_halo_dim = &halo_dim;
static const weft_range window_range = {0, 2};
static const weft_window_dim window_dim = {0,
                                           1,
                                           &window_range,
                                           {WEFT_EDGE_NONE, 0, 0},
                                           {WEFT_EDGE_NONE, 0, 0}},
                             *const good_weft_window_dim = &window_dim;
#define good_cut_count 1
#define good_field_count 1
#define good_dim 0
#define null_weft_halo_start_exchange 1
#define null_weft_window_start_exchange 1
#define null_weft_window_start_stream 1
#define null_weft_window_start_adjoint_exchange 1
#define null_weft_halo_start_add_exchange 1
#define null_weft_halo_start_together_exchange 1
#define null_weft_window_start_together_exchange 1
#define null_weft_window_start_together_stream 1
static weft_halo_fields halo_fields;
static const weft_halo_fields* const good_weft_halo_fields = &halo_fields;
static weft_window_fields window_fields;
static const weft_window_fields* const good_weft_window_fields = &window_fields;
#define good_halo_count 1
#define good_window_count 1
static const weft_tensor* good_weft_tensor;
static const weft_mesh_axis axis = {"dp", 1}, *const good_weft_mesh_axis = &axis;
static const weft_placement placement = {WEFT_SHARD, 0, WEFT_SUM}, *const good_weft_placement = &placement;
static const weft_axis_placement axis_placement = {"dp", {WEFT_SHARD, 0, WEFT_SUM}};
static const weft_axis_placement* const good_weft_axis_placement = &axis_placement;
static const char* const good_axes[1] = {"dp"};
static const int32_t good_coordinates[1] = {0}, good_order[1] = {0};
#define good_axis "dp"
#define good_extents good_shape
#define good_lengths good_shape
#define null_weft_redistribute_stream 1
#define null_weft_redistribute_transfer 1

static const weft_reducer_entry reducer_entry = {"w", 2, WEFT_F32, WEFT_SUM}, *const good_weft_reducer_entry =
                                                                                  &reducer_entry;
static weft_reducer* good_weft_reducer;
static weft_shard_entry shard_entry = {"w", NULL, WEFT_F32};
static const weft_shard_entry* const good_weft_shard_entry = &shard_entry;
static weft_sharded_parameters* good_weft_sharded_parameters;
#define null_weft_sharded_parameters_range_range_count 1
#define null_weft_sharded_parameters_unshard_transfer 1
#define null_weft_sharded_parameters_reduce_scatter_transfer 1
static weft_sampler* good_weft_sampler;
#define good_population 10
#define good_global_batch 2
#define null_weft_clip_grad_norm_norm 1

static char checkpoints[] = "/tmp/weft-bad-arguments-XXXXXX";
static weft_checkpoint_reader* good_weft_checkpoint_reader;
static const weft_checkpoint_string checkpoint_string = {"k", "v"};
static const weft_checkpoint_string* const good_weft_checkpoint_string = &checkpoint_string;
static weft_checkpoint_saver* good_weft_checkpoint_saver;
static bool good_see(void* data, const char* name, const weft_buffer* whole) {
  (void)data, (void)name, (void)whole;
  return true;
}
#define good_give good_see
#define null_weft_checkpoint_saver_create_mesh 1
#define null_weft_checkpoint_saver_save_begun 1
#define null_weft_gather_full_state_mesh 1
#define null_weft_set_full_state_mesh 1
#define any_weft_gather_full_state_root 1
#define any_weft_set_full_state_root 1
#define good_directory "/nowhere"
#define good_file "/nowhere/all.safetensors"
#define good_weft_checkpoint_convert_to "/nowhere/else"
#define null_weft_checkpoint_convert_written 1
#define good_extra_count 1
#define null_weft_checkpoint_save_mesh 1
#define null_weft_checkpoint_load_mesh 1
#define null_weft_checkpoint_load_step 1
#define null_weft_checkpoint_load_folder 1
#define null_weft_checkpoint_verify_progress 1
#define null_weft_checkpoint_export_written 1

static weft_store_server* good_weft_store_server;
static weft_traits traits = WEFT_TRAITS_INIT, *const good_weft_traits = &traits;
static weft_status open_channel(void* data, const weft_channel_init* init, void** channel,
                                weft_error* error) {
  (void)data, (void)init, (void)channel, (void)error;
  return WEFT_UNSUPPORTED;
}
static weft_status write_channel(void* channel, int32_t to, const void* bytes, size_t count, size_t* taken,
                                 weft_error* error) {
  (void)channel, (void)to, (void)bytes, (void)count, (void)taken, (void)error;
  return WEFT_UNSUPPORTED;
}
static weft_status read_channel(void* channel, int32_t from, void* bytes, size_t count, size_t* got,
                                weft_error* error) {
  (void)channel, (void)from, (void)bytes, (void)count, (void)got, (void)error;
  return WEFT_UNSUPPORTED;
}
static const weft_transport transport = {sizeof transport, false,         false,        "none", NULL,
                                         open_channel,     write_channel, read_channel, NULL};
static const weft_transport* const good_weft_transport = &transport;
#define null_weft_group_create_over_store 1
static const int32_t good_ranks[1] = {0};
#define good_rank_count 1
#define good_host "127.0.0.1"
#define good_port 1
#define good_key "k"
#define good_path "/nowhere/store"
#define good_backend "shm"
#define null_weft_group_create_tcp_secret 1
#define null_weft_store_create_tcp_secret 1
#define null_weft_group_create_by_broadcast_host 1
#define null_weft_group_create_by_broadcast_broadcast_data 1
/* A text of no bytes. */
#define null_weft_store_set_value 1
#define null_weft_store_compare_set_expected 1
#define null_weft_store_compare_set_desired 1
/* Numbers that may be negative. */
#define any_weft_store_add_delta 1
#define any_weft_group_split_key 1
#define good_weft_group_split_key 0

/* A group of one rank needs no store. */
#define null_weft_group_create_store 1

static void good_combine(void* data, const void* left, const void* right, void* out, int64_t count,
                         weft_dtype dtype) {
  (void)data, (void)left, (void)right, (void)out, (void)count, (void)dtype;
}
static int32_t good_broadcast(void* broadcast_data, void* data, size_t bytes) {
  (void)broadcast_data, (void)data, (void)bytes;
  return 0;
}
static void good_callback(void* data, const weft_error* e) { (void)data, (void)e; }

static weft_dl_tensor dl_tensor = {memory, {WEFT_DL_CPU, 0}, 1, {WEFT_DL_FLOAT, 32, 1}, good_shape, NULL, 0};
static weft_dl_managed_tensor dl_managed;
static weft_dl_managed_tensor_versioned dl_versioned;
#define good_tensor ((const void*)&dl_tensor)
#define good_DLManagedTensor ((const struct DLManagedTensor*)(const void*)&dl_managed)
#define good_DLManagedTensorVersioned ((const struct DLManagedTensorVersioned*)(const void*)&dl_versioned)

#if LIBRARY_weft_train
/* No bias, gradients that are not requested, one rank. */
#define null_weft_column_linear_forward_group 1
#define null_weft_row_linear_backward_group 1
#define null_weft_column_linear_forward_b 1
#define null_weft_column_linear_backward_group 1
#define null_weft_column_linear_backward_dx 1
#define null_weft_column_linear_backward_dw 1
#define null_weft_column_linear_backward_db 1
#define null_weft_row_linear_forward_group 1
#define null_weft_row_linear_forward_b 1
#define null_weft_row_linear_backward_dx 1
#define null_weft_row_linear_backward_dw 1
#define null_weft_row_linear_backward_db 1
#define null_weft_column_conv2d_forward_group 1
#define null_weft_row_conv2d_backward_group 1
#define null_weft_column_conv2d_forward_b 1
#define null_weft_column_conv2d_backward_group 1
#define null_weft_column_conv2d_backward_dx 1
#define null_weft_column_conv2d_backward_dw 1
#define null_weft_column_conv2d_backward_db 1
#define null_weft_row_conv2d_forward_group 1
#define null_weft_row_conv2d_forward_b 1
#define null_weft_row_conv2d_backward_dx 1
#define null_weft_row_conv2d_backward_dw 1
#define null_weft_row_conv2d_backward_db 1
#define null_weft_vocab_embedding_forward_group 1
#define null_weft_vocab_embedding_backward_group 1
#define null_weft_vocab_cross_entropy_group 1
#define null_weft_vocab_cross_entropy_dlogits 1
#define null_weft_vocab_linear_cross_entropy_group 1
#define null_weft_vocab_linear_cross_entropy_dx 1
#define null_weft_vocab_linear_cross_entropy_dw 1
#define null_weft_mean_squared_error_dy 1
#define null_weft_binary_cross_entropy_dy 1
#define good_vocab 1
static weft_compute* good_weft_compute;
static const weft_matrix* good_weft_matrix;
static weft_maps* good_weft_maps;
static weft_model* good_weft_model;
static weft_trainer* good_weft_trainer;
static weft_loss_scaler* good_weft_loss_scaler;
/* one token, which chose one of two experts; and their matrices */
static weft_token_routes* good_weft_token_routes;
static int64_t expert_numbers[] = {0, 1, 1};
static const weft_buffer of_expert_numbers = {expert_numbers, 3, WEFT_I64, WEFT_CPU};
static double expert_sums[2];
static const weft_buffer of_expert_sums = {expert_sums, 2, WEFT_F64, WEFT_CPU};
static const weft_expert_matrices expert_matrices = WEFT_EXPERT_MATRICES_INIT,
                                  *const good_weft_expert_matrices = &expert_matrices;
static const weft_expert_activations expert_activations = WEFT_EXPERT_ACTIVATIONS_INIT,
                                     *const good_weft_expert_activations = &expert_activations;
#define good_weft_token_routes_create_first_experts (&of_expert_numbers)
#define good_weft_token_routes_rows_offsets (&of_expert_numbers)
#define good_weft_experts_forward_offsets (&of_expert_numbers)
#define good_weft_experts_backward_offsets (&of_expert_numbers)
#define good_weft_experts_weight_gradients_offsets (&of_expert_numbers)
#define good_weft_router_sums_counts (&of_expert_sums)
#define good_weft_router_sums_scores (&of_expert_sums)
#define null_weft_route_tokens_bias 1
#define null_weft_router_sums_bias 1
#define null_weft_route_tokens_backward_bias 1
#define null_weft_route_tokens_backward_shares 1
#define null_weft_route_tokens_backward_dbias 1
#define null_weft_token_routes_create_group 1
#define null_weft_token_routes_sizes_experts 1
#define null_weft_token_routes_sizes_rows 1
#define null_weft_token_routes_sizes_results 1
#define null_weft_token_routes_rows_row_weights 1
#define null_weft_dispatch_rows_transfer 1
#define null_weft_combine_rows_transfer 1
#define null_weft_weighted_sum_weights 1
#define null_weft_loss_scaler_unscale_compute 1
static const weft_token_batch token_batch = {NULL, NULL, 0, 1, 0}, *const good_weft_token_batch =
                                                                       &token_batch;
static weft_expert_balance expert_balance = WEFT_EXPERT_BALANCE_INIT, *const good_weft_expert_balance =
                                                                          &expert_balance;
static const weft_batch batch = {NULL, 0, 0, NULL, 0}, *const good_weft_batch = &batch;
static weft_evaluation evaluation = WEFT_EVALUATION_INIT, *const good_weft_evaluation = &evaluation;
#define good_recipe "{\"model\": {\"layer\": \"ReLU\"}, \"loss\": \"mean_squared_error\"}"
#define good_weft_model_create_options NULL
#define null_weft_model_create_options 1
#define good_weft_trainer_create_from_json_options NULL
#define null_weft_trainer_create_from_json_options 1
#define good_weft_model_create_with_modules_options NULL
#define null_weft_model_create_with_modules_options 1
#define good_module_count 1
static weft_status no_pass(void* user, const weft_module_pass* pass, weft_error* error) {
  (void)user, (void)pass, (void)error;
  return WEFT_OK;
}
static const weft_module a_module = {"A", NULL, 0, NULL, no_pass, no_pass, NULL}, *const good_weft_module =
                                                                                      &a_module;
static const weft_module_pass a_pass = {.struct_size = sizeof(weft_module_pass)},
                              *const good_weft_module_pass = &a_pass;
#define null_weft_trainer_step_batches_result 1
#define null_weft_model_forward_count 1
#define good_weft_trainer_step_batches_rate 0.1
static const int64_t one_token[] = {0};
static const weft_tokens a_prompt = {one_token, 1}, *const good_weft_tokens = &a_prompt;
static int64_t new_tokens[128];
#define good_prompt_count 1
#define good_weft_model_generate_tokens new_tokens
#define good_weft_model_generate_counts new_tokens
static weft_parameter parameter = WEFT_PARAMETER_INIT, *const good_weft_parameter = &parameter;
static weft_step_result step_result = WEFT_STEP_RESULT_INIT, *const good_weft_step_result = &step_result;
static const weft_schedule schedule = WEFT_SCHEDULE_INIT, *const good_weft_schedule = &schedule;
#define good_batch_count 1
#define good_warmup 0
#define good_total 1
#define good_peak 1.0
#define good_floor 0.0
#define good_weft_trainer_step_rate 0.1
#define null_weft_model_load_step 1
#define null_weft_trainer_step_result 1
#define null_weft_trainer_backward_result 1
#define null_weft_trainer_backward_batches_result 1
static const weft_training_plan training_plan = WEFT_TRAINING_PLAN_INIT, *const good_weft_training_plan =
                                                                             &training_plan;
static weft_training_end training_end = WEFT_TRAINING_END_INIT, *const good_weft_training_end = &training_end;
#define null_weft_trainer_train_end 1
static const char* const parts_of_a_model[] = {"head"};
#define good_except parts_of_a_model
#define good_left_out parts_of_a_model
#define good_except_count 1
#define good_left_out_count 1
#define any_weft_model_init_from_except_count 1
#define any_weft_model_init_from_left_out_count 1
#define null_weft_model_init_from_step 1
#define null_weft_trainer_update_result 1
#define null_weft_trainer_gradients_gradients 1
#define good_weft_trainer_update_rate 0.1
#define good_text "[model]"
#endif

static void make_good(void) {
  static int64_t counts[1] = {2};
  static weft_buffer buffer = {memory, 2, WEFT_F32, WEFT_CPU};
  static weft_blocks blocks = {counts, NULL, 1};
  static weft_call call = WEFT_CALL_INIT;
  call.op = WEFT_OP_ALL_REDUCE;
  call.in = call.out = buffer;
  good_weft_buffer = &buffer;
  good_weft_blocks = &blocks;
  good_weft_call = &call;
  dl_managed.dl_tensor = dl_versioned.dl_tensor = dl_tensor;
  dl_versioned.version.major = 1;
  OK(weft_context_create(NULL, &good_weft_context, &error));
  OK(weft_store_create_local(&good_weft_store, &error));
  OK(weft_interrupt_create(&good_weft_interrupt, &error));
  OK(weft_store_secret_create(&good_weft_text, &error));
  OK(weft_group_create(good_weft_context, NULL, 0, 1, NULL, &good_weft_group, &error));
  OK(weft_barrier(good_weft_group, NULL, &good_weft_work, &error));
  OK(weft_persistent_create(good_weft_group, &call, &good_weft_persistent, &error));
  good_calls[0] = good_weft_persistent;
  OK(weft_persistent_exchange_create(good_weft_group, &exchange_plan, &good_weft_persistent_exchange,
                                     &error));
  OK(weft_reduction_create("none", good_combine, NULL, NULL, &good_weft_reduction, &error));
  good_works[0] = good_weft_work;
  static weft_call_options options = WEFT_CALL_OPTIONS_INIT;
  options.reduce_op = WEFT_USER;
  options.reduction = good_weft_reduction;
  good_weft_call_options = &options;
  OK(weft_mesh_create(good_weft_group, &axis, 1, &good_weft_mesh, &error));
  OK(weft_layout_create(good_weft_mesh, &axis_placement, 1, good_shape, 1, &good_weft_layout, &error));
  static weft_tensor tensor = {"w", {memory, 2, WEFT_F32, WEFT_CPU}, NULL, NULL, 0};
  tensor.layout = good_weft_layout;
  good_weft_tensor = &tensor;
  const weft_buffer other = {other_memory, 2, WEFT_F32, WEFT_CPU};
  OK(weft_redistribute(&buffer, good_weft_layout, &other, good_weft_layout, NULL, &good_weft_transfer,
                       &error));
  OK(weft_halo_create(good_weft_layout, &cut, 1, &halo_dim, 1, &good_weft_halo, &error));
  OK(weft_window_create(good_weft_layout, &cut, 1, &window_dim, 1, &good_weft_window, &error));
  OK(weft_window_start(good_weft_window, &buffer, &other, 1, NULL, &good_weft_exchange, &error));
  halo_fields.halo = good_weft_halo;
  window_fields.window = good_weft_window;
  shard_entry.layout = good_weft_layout;
  OK(weft_sharded_parameters_create(good_weft_mesh, &shard_entry, 1, NULL, &good_weft_sharded_parameters,
                                    &error));
  OK(weft_reducer_create(good_weft_mesh, &reducer_entry, 1, NULL, &good_weft_reducer, &error));
  OK(weft_sampler_create(good_weft_mesh, good_population, good_global_batch, 1, &good_weft_sampler, &error));
  CHECK(mkdtemp(checkpoints) != NULL);
  OK(weft_checkpoint_save(checkpoints, NULL, 1, &tensor, 1, &checkpoint_string, 1, NULL, &error));
  OK(weft_checkpoint_reader_open(checkpoints, &good_weft_checkpoint_reader, &error));
  OK(weft_checkpoint_saver_create(NULL, false, &good_weft_checkpoint_saver, &error));
  OK(weft_store_server_create(good_weft_context, NULL, &good_weft_store_server, &error));
  (void)good_callback, (void)good_broadcast,
      (void)good_see; /* one library may have no function that takes one */
#if LIBRARY_weft_train
  static weft_matrix matrix = {memory, 1, 2, WEFT_F32, WEFT_CPU};
  good_weft_matrix = &matrix;
  static weft_maps maps = {memory, {1, 1, 1, 2}, WEFT_F32, WEFT_CPU};
  good_weft_maps = &maps;
  OK(weft_compute_create(good_weft_context, NULL, &good_weft_compute, &error));
  static const weft_mesh_axis both[] = {{"dp", 1}, {"tp", 1}};
  weft_mesh* whole = NULL;
  OK(weft_mesh_create(good_weft_group, both, 2, &whole, &error));
  OK(weft_transformer_create(whole, good_weft_compute, NULL, &good_weft_model, &error));
  OK(weft_trainer_create(good_weft_model, NULL, &good_weft_trainer, &error));
  OK(weft_loss_scaler_create(NULL, &good_weft_loss_scaler, &error));
  static int32_t chosen[1];
  static float weight[1];
  static int64_t first[] = {0, 2};
  const weft_matrix of_chosen = {chosen, 1, 1, WEFT_I32, WEFT_CPU},
                    of_weight = {weight, 1, 1, WEFT_F32, WEFT_CPU};
  const weft_buffer of_first = {first, 2, WEFT_I64, WEFT_CPU};
  OK(weft_token_routes_create(good_weft_compute, NULL, &of_chosen, &of_weight, &of_first,
                              &good_weft_token_routes, &error));
  weft_mesh_destroy(whole);
#endif
}

static void destroy_good(void) {
#if LIBRARY_weft_train
  weft_token_routes_destroy(good_weft_token_routes);
  weft_loss_scaler_destroy(good_weft_loss_scaler);
  weft_trainer_destroy(good_weft_trainer);
  weft_model_destroy(good_weft_model);
  weft_compute_destroy(good_weft_compute);
#endif
  char command[64];
  snprintf(command, sizeof command, "rm -r '%s'", checkpoints);
  CHECK(system(command) == 0);
  weft_checkpoint_reader_destroy(good_weft_checkpoint_reader);
  weft_checkpoint_saver_destroy(good_weft_checkpoint_saver);
  weft_sampler_destroy(good_weft_sampler);
  weft_reducer_destroy(good_weft_reducer);
  weft_sharded_parameters_destroy(good_weft_sharded_parameters);
  weft_exchange_destroy(good_weft_exchange);
  weft_window_destroy(good_weft_window);
  weft_halo_destroy(good_weft_halo);
  weft_transfer_destroy(good_weft_transfer);
  weft_layout_destroy(good_weft_layout);
  weft_mesh_destroy(good_weft_mesh);
  weft_reduction_destroy(good_weft_reduction);
  weft_persistent_exchange_destroy(good_weft_persistent_exchange);
  weft_persistent_destroy(good_weft_persistent);
  weft_work_destroy(good_weft_work);
  weft_group_destroy(good_weft_group);
  weft_store_server_destroy(good_weft_store_server);
  weft_store_destroy(good_weft_store);
  weft_interrupt_destroy(good_weft_interrupt);
  weft_text_destroy(good_weft_text);
  weft_context_destroy(good_weft_context);
}

#endif /* WEFT_TESTS_CAPI_BAD_ARGUMENTS_H */
