/* Checkpoints: save and load the caller's tensors on any mesh, and read the contents of a checkpoint in one
 * process.
 *
 * A checkpoint is a folder such as step-00000007 with safetensors files and an index. Its parent folder
 * holds a file `latest` with the name of the newest checkpoint. Paths and all other strings are UTF-8.
 * weft reads them only until the call returns. weft compares bytes that it reads from a file with the hash
 * that was written with them. If the bytes were changed, the call fails with WEFT_CORRUPT, and the text
 * names the file and the bytes. */
#ifndef WEFT_C_CHECKPOINT_H
#define WEFT_C_CHECKPOINT_H

#include "weft/c/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A string of the caller's that is saved with a checkpoint: the position of a sampler, a configuration. */
typedef struct weft_checkpoint_string {
  const char* key;
  const char* value;
} weft_checkpoint_string;

typedef struct weft_checkpoint_save_options {
  uint32_t struct_size;
  /* How many checkpoints stay in `directory`, including the new one. When the new one is complete, weft
   * removes the oldest steps. Checkpoints of later steps stay. 0: all stay. */
  int32_t keep;
  /* weft calls it at each stage, on the rank and in the thread that reach the stage: "folder" (made,
   * empty), "data" (before each tensor's bytes), "file" (this rank's file is complete), "index" (written),
   * "exchanged" (the new folder has replaced a checkpoint of the same step, which is removed next;
   * "spared" if the file system cannot exchange folders), "renamed" (the folder has its name), "latest"
   * (done), "old" (before the files of an older checkpoint are removed, for `keep`). For file, index and
   * latest also "file written", "file synced", "file named" and so on. NULL: weft calls nothing. If the
   * function throws a C++ exception, the save fails with WEFT_SYSTEM on this rank and on the others. */
  void (*on_stage)(void* data, const char* stage);
  void* data;
} weft_checkpoint_save_options;
#define WEFT_CHECKPOINT_SAVE_OPTIONS_INIT \
  { sizeof(weft_checkpoint_save_options), 0, NULL, NULL }

typedef struct weft_checkpoint_load_options {
  uint32_t struct_size;
  /* Returns whether the load may ignore the tensor `name`, which is in the checkpoint but not in the list.
   * NULL: the load may ignore no tensor. It is called on the loading thread, before anything is read.
   * `name` is valid until the function returns. If the function throws a C++ exception, the load fails
   * with WEFT_SYSTEM, and nothing was read. */
  bool (*may_leave)(void* data, const char* name);
  void* data;
} weft_checkpoint_load_options;
#define WEFT_CHECKPOINT_LOAD_OPTIONS_INIT \
  { sizeof(weft_checkpoint_load_options), NULL, NULL }

/* Writes directory/step-N for step N, 0 or more, and then names it in directory/latest. Makes missing
 * folders. `mesh` is a root mesh; NULL means one rank. Collective among the ranks of the mesh. All ranks must
 * give the same directory, step, extra and `keep`, and the same tensors in the same order (otherwise
 * WEFT_MISMATCH). Tensors must be on the host. With several ranks each tensor must have a layout, and no
 * layout may have WEFT_PARTIAL. If several ranks hold the same elements, the first of these ranks writes
 * them. Names of tensors must be different, and so must keys of strings. `tensors` and `extra` may be NULL if
 * their count is
 * 0. `options` may be NULL. weft does not write into the tensors.
 *
 * Blocks until all data is on the disk. It waits at most the deadline of the mesh's group until all ranks
 * have agreed on the arguments. Then it waits at most an hour for each rank's file. Saves of one process
 * to one directory, including those of a weft_checkpoint_saver, are written one after the other in the
 * order of the calls. If the process is killed at any moment, or the disk is full, the previous checkpoint
 * stays complete, and `latest` names it. A checkpoint of the same step is replaced. If one rank cannot
 * write, all ranks get WEFT_SYSTEM, with the text of that rank and the state of the disk. A wrong tensor
 * on one rank is an error on all ranks. But if an argument cannot be read (NULL, a number that is no
 * dtype), only that rank gets an error. The other ranks wait for it until their deadline. */
weft_status weft_checkpoint_save(const char* directory, const weft_mesh* mesh, int64_t step,
                                 const weft_tensor* tensors, int32_t count,
                                 const weft_checkpoint_string* extra, int32_t extra_count,
                                 const weft_checkpoint_save_options* options, weft_error* error);

/* Fills the tensors from the latest checkpoint in `directory`, or from `directory` itself if it is a
 * checkpoint. Collective among the ranks of `mesh` (NULL: one rank). The mesh and the layouts may differ from
 * those of the save. Each rank reads the parts that it holds. Blocks as weft_checkpoint_save does. Buffers
 * are on the host, and must not overlap. Only tied tensors may have exactly the same buffer. All ranks read
 * the checkpoint that rank 0 finds. If a rank finds another checkpoint, the call fails with WEFT_MISMATCH.
 *
 * Fails with WEFT_BAD_ARGUMENT on all ranks, before any buffer is written, if the checkpoint lacks a
 * tensor, or has a tensor that is not in the list or has other extents or another dtype. The text lists
 * them. Fails with WEFT_CORRUPT if a file is damaged or missing. After any other error the buffers' values
 * are undefined. `*step` and `*folder` (each pointer may be NULL) become the step of the checkpoint and
 * its folder, in which weft_checkpoint_reader_open finds the strings. The caller destroys `*folder`. */
weft_status weft_checkpoint_load(const char* directory, const weft_mesh* mesh, const weft_tensor* tensors,
                                 int32_t count, const weft_checkpoint_load_options* options, int64_t* step,
                                 weft_text** folder, weft_error* error);

/* A saver saves in the background. weft_checkpoint_saver_save returns when this rank's part is copied, and
 * a thread writes the copy. The saver keeps the memory of the copy, as large as this rank's file, for the
 * next save. One thread at a time may use a saver. */
typedef struct weft_checkpoint_saver weft_checkpoint_saver;

/* Collective among the ranks of `mesh`, a root mesh. NULL: one rank. While a save is still being written,
 * a new save waits. If `refuse` is true, it is refused on all ranks instead. */
weft_status weft_checkpoint_saver_create(const weft_mesh* mesh, bool refuse, weft_checkpoint_saver** saver,
                                         weft_error* error);
/* Waits for the save that is being written. If that save's error was not returned by any call, writes the
 * error to the log. */
void weft_checkpoint_saver_destroy(weft_checkpoint_saver* saver);
/* Begins a save like weft_checkpoint_save with these arguments, over the saver's mesh. Collective. When
 * the call returns, the program may change the tensors. *begun (the pointer may be NULL) becomes false if
 * the save was refused. If the previous save has failed, this call returns that error on all ranks and
 * begins nothing. The next call begins a save again. The writing thread calls `options->on_stage`. The
 * function and `options->data` must stay valid until the save is done. */
weft_status weft_checkpoint_saver_save(weft_checkpoint_saver* saver, const char* directory, int64_t step,
                                       const weft_tensor* tensors, int32_t count,
                                       const weft_checkpoint_string* extra, int32_t extra_count,
                                       const weft_checkpoint_save_options* options, bool* begun,
                                       weft_error* error);
/* Waits until the last save is written on all ranks. Returns the error of that save, unless a call has
 * returned it before. */
weft_status weft_checkpoint_saver_wait(weft_checkpoint_saver* saver, weft_error* error);

/* The value of `root` that means every rank. */
#define WEFT_EVERY_RANK (-1)

/* A function of the program that reads, or writes, a global tensor. `whole` is row-major on the host, and
 * valid until the function returns. If the function returns false or throws a C++ exception, the call
 * fails with WEFT_SYSTEM on all ranks. */
typedef bool (*weft_whole_function)(void* data, const char* name, const weft_buffer* whole);

/* Gathers each global tensor and passes it to `see` on rank `root` of the mesh, or on every rank
 * (WEFT_EVERY_RANK). The tensors follow one another in the order of the list, so at most one global tensor
 * and one part are in memory. `see` must only read. Collective among the ranks of `mesh` (NULL: one rank),
 * which must all give the same tensors and the same root. weft does not call `see` on a rank that is not
 * `root`. Waits for the other ranks. Each single wait lasts at most the deadline of the mesh's group. */
weft_status weft_gather_full_state(const weft_mesh* mesh, const weft_tensor* tensors, int32_t count,
                                   int32_t root, weft_whole_function see, void* data, weft_error* error);
/* The reverse of weft_gather_full_state. On rank `root` it calls `give`, which must fill each global
 * tensor, and sends the other ranks their parts. With WEFT_EVERY_RANK every rank calls its own `give`, and
 * all must give the same values. After an error the tensors' values are undefined. */
weft_status weft_set_full_state(const weft_mesh* mesh, const weft_tensor* tensors, int32_t count,
                                int32_t root, weft_whole_function give, void* data, weft_error* error);

/* The functions below are for one process. They do not communicate, and wait only for the disk. Any thread
 * may call them, but only one thread at a time may use a weft_checkpoint_reader. */

/* Gives the folder and the step that directory/latest names. NULL and -1 if there is no such file. Fails
 * with WEFT_CORRUPT if the file names no checkpoint. The caller destroys the text. */
weft_status weft_checkpoint_latest(const char* directory, weft_text** folder, int64_t* step,
                                   weft_error* error);

/* An open checkpoint. The reader holds the index of the checkpoint, but no elements. It needs no context. */
typedef struct weft_checkpoint_reader weft_checkpoint_reader;

/* Opens the latest checkpoint in `directory`, or `directory` itself if it is a checkpoint. Fails with
 * WEFT_BAD_ARGUMENT if there is no checkpoint, and with WEFT_CORRUPT if its index is damaged. */
weft_status weft_checkpoint_reader_open(const char* directory, weft_checkpoint_reader** reader,
                                        weft_error* error);
void weft_checkpoint_reader_destroy(weft_checkpoint_reader* reader);

/* Strings that the functions below return are valid as long as the reader. */

weft_status weft_checkpoint_reader_step(const weft_checkpoint_reader* reader, int64_t* step,
                                        weft_error* error);
weft_status weft_checkpoint_reader_folder(const weft_checkpoint_reader* reader, const char** folder,
                                          weft_error* error);
/* The mesh on which the checkpoint was written, such as "dp=2 x tp=4". "" if it was written without a
 * mesh. */
weft_status weft_checkpoint_reader_mesh(const weft_checkpoint_reader* reader, const char** mesh,
                                        weft_error* error);
/* *hashed becomes false if an older version of weft wrote the checkpoint without hashes. Changed bytes
 * cannot be detected then. */
weft_status weft_checkpoint_reader_hashed(const weft_checkpoint_reader* reader, bool* hashed,
                                          weft_error* error);
weft_status weft_checkpoint_reader_extra_count(const weft_checkpoint_reader* reader, int32_t* count,
                                               weft_error* error);
/* Gives string number `index` of the strings that were saved with the checkpoint, in the order of their
 * keys. */
weft_status weft_checkpoint_reader_extra(const weft_checkpoint_reader* reader, int32_t index,
                                         weft_checkpoint_string* extra, weft_error* error);

/* The description of a global tensor in a checkpoint, however many ranks held it. */
typedef struct weft_checkpoint_tensor {
  const char* name;
  weft_dtype dtype;
  int32_t dim_count;
  int64_t extents[WEFT_MAX_DIMS]; /* extents beyond dim_count are 0 */
  int64_t count;                  /* the number of elements */
} weft_checkpoint_tensor;

weft_status weft_checkpoint_reader_tensor_count(const weft_checkpoint_reader* reader, int32_t* count,
                                                weft_error* error);
/* Gives tensor number `index`, in the order of the tensors' names. */
weft_status weft_checkpoint_reader_tensor(const weft_checkpoint_reader* reader, int32_t index,
                                          weft_checkpoint_tensor* tensor, weft_error* error);
/* The index of the tensor of this name. -1 if there is none. */
weft_status weft_checkpoint_reader_find(const weft_checkpoint_reader* reader, const char* name,
                                        int32_t* index, weft_error* error);
/* Reads global tensor `index` into `out`, row-major. `out` must be on the host, and have the tensor's dtype
 * and exactly its number of elements. After an error the values in `out` are undefined. */
weft_status weft_checkpoint_reader_read(const weft_checkpoint_reader* reader, int32_t index,
                                        const weft_buffer* out, weft_error* error);

/* Reads all of a checkpoint (the latest in `directory`, or `directory` itself). *faults becomes a list of all
 * faults (missing or damaged files, and bytes that differ from the written ones), one line each, without a
 * newline at the end. It is empty if the checkpoint is sound. An index that cannot be read, or a missing
 * checkpoint, is also a fault. The caller destroys the text.
 *
 * weft calls `progress`, which may be NULL, on this thread with the number of bytes read so far and the total
 * number of bytes. If it throws a C++ exception, the call fails with WEFT_SYSTEM. */
weft_status weft_checkpoint_verify(const char* directory,
                                   void (*progress)(void* data, int64_t bytes, int64_t all), void* data,
                                   weft_text** faults, weft_error* error);

typedef struct weft_checkpoint_export_options {
  uint32_t struct_size;
  /* Returns the name that a tensor gets in the file. "" or NULL leaves the tensor out. The string belongs
   * to the program. weft copies it before the next call of the function. A NULL function exports all
   * tensors under their own names. Called on the exporting thread, before anything is written. If the
   * function throws a C++ exception, the export fails with WEFT_SYSTEM. */
  const char* (*rename)(void* data, const char* name);
  void* data;
} weft_checkpoint_export_options;
#define WEFT_CHECKPOINT_EXPORT_OPTIONS_INIT \
  { sizeof(weft_checkpoint_export_options), NULL, NULL }

/* Writes the global tensors of a checkpoint (the latest in `directory`, or `directory` itself) into one
 * safetensors file, which appears complete or not at all. The file's metadata are the strings saved with the
 * checkpoint, and "weft_step". At most one tensor is in memory. *written (the pointer may be NULL) becomes
 * the number of tensors. Fails with WEFT_BAD_ARGUMENT if two tensors get one name, or if no tensor is
 * left. */
weft_status weft_checkpoint_export(const char* directory, const char* file,
                                   const weft_checkpoint_export_options* options, int64_t* written,
                                   weft_error* error);

typedef struct weft_checkpoint_convert_options {
  uint32_t struct_size;
  /* The number of files over which the tensors' rows are cut, as WEFT_SHARD of dimension 0 cuts them over
   * that number of ranks. 0: one file. */
  int32_t files;
  /* Returns the name that a tensor gets, as in weft_checkpoint_export_options. */
  const char* (*rename)(void* data, const char* name);
  /* Returns the dtype of the tensor in the copy, WEFT_F32 or WEFT_BF16. Elements are rounded to nearest
   * even. Called with the new name of each tensor that is stored as WEFT_F32 or WEFT_BF16 (`stored`).
   * Tensors of other dtypes keep their dtype. NULL: all tensors keep their dtype. If the function throws a
   * C++ exception, the call fails with WEFT_SYSTEM. */
  weft_dtype (*dtype)(void* data, const char* name, weft_dtype stored);
  void* data;
  /* Converts names and shapes of older programs (to_qkv, 1x1 convolutions, spectral norms) to the current
   * ones, before `rename` is called. */
  bool old_names;
} weft_checkpoint_convert_options;
#define WEFT_CHECKPOINT_CONVERT_OPTIONS_INIT \
  { sizeof(weft_checkpoint_convert_options), 0, NULL, NULL, NULL, false }

/* Copies a checkpoint (the latest in `directory`, or `directory` itself), or the safetensors file `directory`
 * of any program, into the folder `to`. The copy is like a checkpoint of weft_checkpoint_save: complete or
 * absent, with hashes, and named in to/latest. The copy keeps the step and the strings. At most one part of
 * one tensor is in memory. *written (the pointer may be NULL) becomes the number of tensors. Fails with
 * WEFT_BAD_ARGUMENT if two tensors get one name, no tensor is left, `directory` lies in `to`, or an option is
 * unknown. */
weft_status weft_checkpoint_convert(const char* directory, const char* to,
                                    const weft_checkpoint_convert_options* options, int64_t* written,
                                    weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_CHECKPOINT_H */
