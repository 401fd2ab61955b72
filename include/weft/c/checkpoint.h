/* Checkpoints: saves and loads tensors of the caller's on any mesh, and reads the contents of a checkpoint
 * in one process.
 *
 * A checkpoint is a folder, step-00000007, of safetensors files with an index; the folder it is in names the
 * latest one. Paths and all other strings are UTF-8; they are read until the call is over and not kept. Bytes
 * that are read from a file are compared with the hash that was written with them: changed bytes are
 * WEFT_CORRUPT, and the text names the file and the bytes. */
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
  /* How many checkpoints `directory` keeps, this one among them: once it is whole, the oldest steps are
   * removed. Steps after this one stay. 0: all. */
  int32_t keep;
  /* Called at each stage as it is reached, on the rank and the thread that reach it: "folder" (made, empty),
   * "data" (before each tensor's bytes), "file" (this rank's is whole), "index" (written), "exchanged" (with
   * a checkpoint of the same step, which is removed next; "spared" where the file system cannot exchange
   * folders), "renamed" (the folder has its name), "latest" (done), "old" (before the files of an older one
   * are removed, for `keep`); and of file, index and latest "file written", "file synced", "file named" and
   * so on. NULL: nobody. An exception of a function in C++ is WEFT_SYSTEM here and on the other ranks. */
  void (*on_stage)(void* data, const char* stage);
  void* data;
} weft_checkpoint_save_options;
#define WEFT_CHECKPOINT_SAVE_OPTIONS_INIT \
  { sizeof(weft_checkpoint_save_options), 0, NULL, NULL }

typedef struct weft_checkpoint_load_options {
  uint32_t struct_size;
  /* Whether a tensor of the checkpoint that is not in the list may be left there; NULL: none may. Called on
   * the thread that loads, before anything is read; the name lives as long as the call. An exception of a
   * function in C++ is WEFT_SYSTEM, and nothing was read. */
  bool (*may_leave)(void* data, const char* name);
  void* data;
} weft_checkpoint_load_options;
#define WEFT_CHECKPOINT_LOAD_OPTIONS_INIT \
  { sizeof(weft_checkpoint_load_options), NULL, NULL }

/* Writes directory/step-N for step N, 0 or more, and then names it in directory/latest; folders are made.
 * `mesh` is a whole mesh; NULL: one rank. Collective among its ranks, which give the same directory, step,
 * extra, `keep`, and tensors in the same order, on the host (otherwise WEFT_MISMATCH); on several ranks each
 * has a layout, and none is WEFT_PARTIAL. The first of several ranks that hold the same elements writes them.
 * No two tensors have one name, and no two strings one key. `tensors` and `extra` may be NULL if their count
 * is 0. `options` may be NULL. Memory stays the caller's, and is not written.
 *
 * Blocks until all is on the disk. For other ranks it waits at most the deadline of the mesh's group until
 * all agree on the arguments, and then an hour for each rank's file. Saves of one process to one directory,
 * also those of a weft_checkpoint_saver, are written one after the other in the order of the calls. Killed at
 * any moment, or out of space, it leaves the previous checkpoint whole, and named by `latest`. A checkpoint
 * of the same step is replaced. If one rank cannot write, all ranks get WEFT_SYSTEM, with its text and the
 * state of the disk; a wrong tensor on one rank is an error of all. NULL, a number that is no dtype and the
 * like are found on each rank alone: the others wait for it until their deadline. */
weft_status weft_checkpoint_save(const char* directory, const weft_mesh* mesh, int64_t step,
                                 const weft_tensor* tensors, int32_t count,
                                 const weft_checkpoint_string* extra, int32_t extra_count,
                                 const weft_checkpoint_save_options* options, weft_error* error);

/* Fills the tensors from directory's latest checkpoint, or from `directory` itself where that is one.
 * Collective among the ranks of `mesh` (NULL: one rank), which may be another mesh than the one that wrote
 * it, as may be the layouts; each rank reads what it holds. Blocks as weft_checkpoint_save does. Buffers are
 * on the host, and do not overlap, except for two that are the same as a whole (tied tensors). All ranks read
 * the checkpoint that rank 0 finds; one that sees another is WEFT_MISMATCH.
 *
 * WEFT_BAD_ARGUMENT before anything is written, on all ranks, where a tensor is missing, is there and not in
 * the list, or has other extents or another dtype: the text has them all. WEFT_CORRUPT if a file is
 * damaged or missing. After any other error the buffers' values are undefined. `*step` and `*folder`, each
 * may be NULL, get its step and the folder that was read: opened by weft_checkpoint_reader_open, it gives the
 * strings. The text is the caller's. */
weft_status weft_checkpoint_load(const char* directory, const weft_mesh* mesh, const weft_tensor* tensors,
                                 int32_t count, const weft_checkpoint_load_options* options, int64_t* step,
                                 weft_text** folder, weft_error* error);

/* Saves in the background: weft_checkpoint_saver_save returns when this rank's part is copied, and a
 * thread writes the copy. It keeps the copy's memory, as much as this rank's file has, for the next save.
 * For one thread at a time. */
typedef struct weft_checkpoint_saver weft_checkpoint_saver;

/* Collective among the ranks of `mesh`, a whole mesh; NULL: one rank. `refuse`: a save while the one
 * before it is being written is refused on all ranks; otherwise it waits. */
weft_status weft_checkpoint_saver_create(const weft_mesh* mesh, bool refuse, weft_checkpoint_saver** saver,
                                         weft_error* error);
/* Waits for the save that is being written. An error that no call has returned is written to the log. */
void weft_checkpoint_saver_destroy(weft_checkpoint_saver* saver);
/* weft_checkpoint_save of these arguments over the saver's mesh: collective, and the tensors may be
 * changed at once. *begun, may be NULL: false if it was refused. If the save before this one has
 * failed, that error, on all ranks, and nothing is begun; the next one is. `options->on_stage` is called
 * by the thread that writes: it and `options->data` must be good until the save is done. */
weft_status weft_checkpoint_saver_save(weft_checkpoint_saver* saver, const char* directory, int64_t step,
                                       const weft_tensor* tensors, int32_t count,
                                       const weft_checkpoint_string* extra, int32_t extra_count,
                                       const weft_checkpoint_save_options* options, bool* begun,
                                       weft_error* error);
/* Waits until the last save is written, on all ranks, and gives its error unless that was given before. */
weft_status weft_checkpoint_saver_wait(weft_checkpoint_saver* saver, weft_error* error);

/* In place of a root: every rank. */
#define WEFT_EVERY_RANK (-1)

/* Sees, or writes, the whole of a tensor: `whole` is row-major on the host, good until it returns. False
 * ends the call with WEFT_SYSTEM on all ranks, and so does an exception of a function in C++. */
typedef bool (*weft_whole_function)(void* data, const char* name, const weft_buffer* whole);

/* Shows each tensor, whole, to `see` on rank `root` of the mesh, or on every rank: one after the other, in
 * the order of the list, so that no more than one whole and one part are in memory. `see` only reads.
 * Collective among the ranks of `mesh` (NULL: one rank), which give the same tensors and the same root; on
 * other ranks `see` is not called. Blocks for the others, each time at most the deadline of the mesh's
 * group. */
weft_status weft_gather_full_state(const weft_mesh* mesh, const weft_tensor* tensors, int32_t count,
                                   int32_t root, weft_whole_function see, void* data, weft_error* error);
/* The reverse: calls `give` for each tensor on rank `root`, which sends the others their parts; with
 * WEFT_EVERY_RANK each rank calls its own `give`, and all give the same. After an error the tensors' values
 * are undefined. */
weft_status weft_set_full_state(const weft_mesh* mesh, const weft_tensor* tensors, int32_t count,
                                int32_t root, weft_whole_function give, void* data, weft_error* error);

/* The functions from here on are for one process: they do not communicate, and block for the disk alone.
 * Any thread may call them; a weft_checkpoint_reader is for one thread at a time. */

/* The folder and the step that directory/latest names; NULL and -1 if there is no such file.
 * WEFT_CORRUPT if it names no checkpoint. The text is the caller's. */
weft_status weft_checkpoint_latest(const char* directory, weft_text** folder, int64_t* step,
                                   weft_error* error);

/* An open checkpoint. It holds its index, and no elements; needs no context. */
typedef struct weft_checkpoint_reader weft_checkpoint_reader;

/* Opens directory's latest checkpoint, or `directory` itself where that is one. WEFT_BAD_ARGUMENT if
 * there is none, WEFT_CORRUPT if its index is not sound. */
weft_status weft_checkpoint_reader_open(const char* directory, weft_checkpoint_reader** reader,
                                        weft_error* error);
void weft_checkpoint_reader_destroy(weft_checkpoint_reader* reader);

/* Strings that the functions below give live as long as the reader. */

weft_status weft_checkpoint_reader_step(const weft_checkpoint_reader* reader, int64_t* step,
                                        weft_error* error);
weft_status weft_checkpoint_reader_folder(const weft_checkpoint_reader* reader, const char** folder,
                                          weft_error* error);
/* The mesh it was written on, "dp=2 x tp=4"; "" if there was none. */
weft_status weft_checkpoint_reader_mesh(const weft_checkpoint_reader* reader, const char** mesh,
                                        weft_error* error);
/* False: it was written before checkpoints had hashes, so that changed bytes cannot be detected. */
weft_status weft_checkpoint_reader_hashed(const weft_checkpoint_reader* reader, bool* hashed,
                                          weft_error* error);
weft_status weft_checkpoint_reader_extra_count(const weft_checkpoint_reader* reader, int32_t* count,
                                               weft_error* error);
/* String `index` of those saved with it, in the order of their keys. */
weft_status weft_checkpoint_reader_extra(const weft_checkpoint_reader* reader, int32_t index,
                                         weft_checkpoint_string* extra, weft_error* error);

/* The description of a tensor in a checkpoint: of the whole, however many ranks held it. */
typedef struct weft_checkpoint_tensor {
  const char* name;
  weft_dtype dtype;
  int32_t dim_count;
  int64_t extents[WEFT_MAX_DIMS]; /* those beyond dim_count are 0 */
  int64_t count;                  /* of elements */
} weft_checkpoint_tensor;

weft_status weft_checkpoint_reader_tensor_count(const weft_checkpoint_reader* reader, int32_t* count,
                                                weft_error* error);
/* Tensor `index`, in the order of their names. */
weft_status weft_checkpoint_reader_tensor(const weft_checkpoint_reader* reader, int32_t index,
                                          weft_checkpoint_tensor* tensor, weft_error* error);
/* The index of the tensor of this name; -1: there is none. */
weft_status weft_checkpoint_reader_find(const weft_checkpoint_reader* reader, const char* name,
                                        int32_t* index, weft_error* error);
/* The whole of tensor `index` into `out`, row-major: memory of the caller's on the host, of its dtype,
 * with room for just as many elements. After an error its values are undefined. */
weft_status weft_checkpoint_reader_read(const weft_checkpoint_reader* reader, int32_t index,
                                        const weft_buffer* out, weft_error* error);

/* Reads all of a checkpoint (directory's latest, or `directory` itself). *faults becomes everything that is
 * wrong with it, a line each, without a newline behind the last: files that are missing or not sound, bytes
 * that are not those that were written. An empty text: it is whole. An index that cannot be read, or no
 * checkpoint at all, is a fault, too. The text is the caller's.
 *
 * `progress`, may be NULL, is called on this thread with the bytes read so far and those in all; an
 * exception of a function in C++ ends the call with WEFT_SYSTEM. */
weft_status weft_checkpoint_verify(const char* directory,
                                   void (*progress)(void* data, int64_t bytes, int64_t all), void* data,
                                   weft_text** faults, weft_error* error);

typedef struct weft_checkpoint_export_options {
  uint32_t struct_size;
  /* The name that a tensor gets in the file; "" or NULL leaves it out. The string is the host's, and is
   * copied before the next call. NULL: all, under their own names. Called on the thread that exports, before
   * anything is written; an exception of a function in C++ is WEFT_SYSTEM. */
  const char* (*rename)(void* data, const char* name);
  void* data;
} weft_checkpoint_export_options;
#define WEFT_CHECKPOINT_EXPORT_OPTIONS_INIT \
  { sizeof(weft_checkpoint_export_options), NULL, NULL }

/* Writes the tensors of a checkpoint (directory's latest, or `directory` itself), whole, into one
 * safetensors file, which is there whole or not at all. Its metadata are the strings saved with the
 * checkpoint, and "weft_step". No more than one tensor is in memory. *written, may be NULL, becomes their
 * number. WEFT_BAD_ARGUMENT if two get one name, or none is left. */
weft_status weft_checkpoint_export(const char* directory, const char* file,
                                   const weft_checkpoint_export_options* options, int64_t* written,
                                   weft_error* error);

typedef struct weft_checkpoint_convert_options {
  uint32_t struct_size;
  /* How many files the tensors' rows are cut into, as WEFT_SHARD(0) cuts them over so many ranks. 0: one. */
  int32_t files;
  /* The name that a tensor gets; as in weft_checkpoint_export_options. */
  const char* (*rename)(void* data, const char* name);
  /* The dtype that the elements of a tensor get, WEFT_F32 or WEFT_BF16, rounded to nearest even: asked for
   * those of WEFT_F32 and WEFT_BF16, which `stored` says, under their new names. Others stay. NULL: all stay.
   * An exception of a function in C++ is WEFT_SYSTEM. */
  weft_dtype (*dtype)(void* data, const char* name, weft_dtype stored);
  void* data;
  /* Names and shapes of older programs (to_qkv, 1x1 convolutions, spectral norms) become those of today,
   * before `rename` sees them. */
  bool old_names;
} weft_checkpoint_convert_options;
#define WEFT_CHECKPOINT_CONVERT_OPTIONS_INIT \
  { sizeof(weft_checkpoint_convert_options), 0, NULL, NULL, NULL, false }

/* Writes a checkpoint (directory's latest, or `directory` itself), or the safetensors file `directory` of any
 * program, again into the folder `to`, as weft_checkpoint_save does: whole or not there, with hashes, and
 * named by to/latest. The copy keeps the step and the strings. No more than one part of one tensor is in
 * memory. *written, may be NULL, becomes the number of tensors. WEFT_BAD_ARGUMENT if two tensors get one
 * name, no tensor is left, `directory` lies in `to`, or an option is unknown. */
weft_status weft_checkpoint_convert(const char* directory, const char* to,
                                    const weft_checkpoint_convert_options* options, int64_t* written,
                                    weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_CHECKPOINT_H */
