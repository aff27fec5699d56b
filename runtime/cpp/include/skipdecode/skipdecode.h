/* skipdecode.h: load a bundle that skip-export wrote and generate with it. C99; no exception crosses this border.
 *
 * Errors: every function that can fail returns a skd_status*: NULL when it worked, else a code and one line (what, where, what to
 * do) that the caller releases with skd_status_destroy. Outputs are untouched when a function fails. After SKD_ERROR_CAPACITY a
 * session is as it was; after any other error of skd_session_add, _step or _cancel destroy it: its rows may be half a step ahead.
 * What is not named at a function below: INTERNAL, for arguments that are NULL, too small, or of a wrong struct_size. These are a
 * mistake in the caller, to be mended there, and no exception to that rule: their code does not tell them from others.
 *
 * Ownership: what a *_create, _load, _encode or _decode function hands out belongs to the caller and goes back through the
 * matching *_destroy or skd_free, which take NULL and may be called from any thread. A session and a tokenizer keep what they
 * need of their bundle alive, so handles may be destroyed in any order; on a GPU before main returns, after which CUDA's
 * libraries are gone.
 *
 * Threads: a bundle may be shared by any number of threads. A session serves one thread at a time; sessions of one bundle run
 * beside each other. A tokenizer may be shared, its calls take turns. Statuses belong to whoever got them. Loading a bundle and
 * destroying the last handle that keeps one wait for each other.
 *
 * Options: structs start with struct_size; fill them with their *_default() and change what differs.
 */
#ifndef SKIPDECODE_SKIPDECODE_H_
#define SKIPDECODE_SKIPDECODE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define SKD_API __attribute__((visibility("default")))
#else
#define SKD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct skd_status skd_status;
typedef struct skd_bundle skd_bundle;
typedef struct skd_session skd_session;
typedef struct skd_tokenizer skd_tokenizer;

typedef enum skd_code {
  SKD_OK = 0,
  SKD_ERROR_BUNDLE = 1,   /* a bundle that is missing, damaged, edited or of another format version */
  SKD_ERROR_TARGET = 2,   /* a library, its version, a CPU that the engines do not fit, a GPU that is not there or fails */
  SKD_ERROR_CAPACITY = 3, /* more rows or tokens than there is room for, out of memory, an id or a value out of range */
  SKD_ERROR_SCHEDULE = 4, /* a schedule that cannot be */
  SKD_ERROR_INTERNAL = 5, /* a mistake: in how a function is called, or of this library's */
  SKD_ERROR_TOKENIZER = 6 /* no tokenizer, or none that this library can use: give token ids */
} skd_code;

typedef enum skd_finish {
  SKD_FINISH_NONE = 0,  /* the row goes on */
  SKD_FINISH_STOP = 1,  /* this token ends sequences */
  SKD_FINISH_LENGTH = 2 /* max_new_tokens is reached */
} skd_finish;

typedef struct skd_load_options {
  size_t struct_size;
  const char* target; /* where engines run: "cpu", "cuda" (the first GPU); NULL: the first of these that the bundle has */
  uint32_t threads;   /* of the process's one pool, decided as the library is; up to 1024, 0: one for each usable core */
  const char* onnxruntime_library; /* path of libonnxruntime (cuda: onnxruntime-gpu's); NULL: the system's, or one beside this.
                                    * The process has one, that of the first load which finds it fit for its bundle; later
                                    * ones do not read this */
  uint32_t no_cuda_graphs;         /* not 0: on a GPU every run of an engine is a call, none the launch of a CUDA graph (0) */
} skd_load_options;

typedef struct skd_bundle_info {
  size_t struct_size;
  const char* name;  /* of the model; lives as long as the bundle */
  const char* dtype; /* of the source weights */
  uint32_t num_layers, num_variants, num_segments;
  uint64_t vocab_size;
  uint64_t max_length; /* tokens of a row, prompt and generated */
  uint64_t max_batch;  /* rows */
  double mean_layers;  /* of the schedule, over its span */
  double load_s;
} skd_bundle_info;

typedef struct skd_session_options {
  size_t struct_size;
  uint32_t max_rows;          /* rows at the same time, 1 .. max_batch (1) */
  uint32_t max_prompt_tokens; /* of a row; 0: half of the bundle's max_length */
  uint32_t max_new_tokens;    /* of a row; 0: what max_length leaves. The KV buffer is made for as many */
  uint32_t full_depth;        /* not 0: every layer at every position, the baseline (0) */
} skd_session_options;

typedef struct skd_row_options {
  size_t struct_size;
  uint32_t max_new_tokens; /* 1 .. the session's (64) */
  uint32_t do_sample;      /* 0: greedy, the next five are not read (0) */
  double temperature;      /* above 0 (1) */
  uint32_t top_k;          /* most likely tokens kept; 0: all (0) */
  double top_p;            /* least probability mass kept, most likely first, in (0, 1]; 1: all (1) */
  uint64_t seed;           /* tokens follow from seed, generator_row and step: splitmix64, as in Python (0) */
  uint32_t generator_row;  /* the row's number in a Python batch that is to be repeated (0) */
  uint32_t ignore_eos;     /* not 0: go on after tokens that end sequences, for measuring (0) */
} skd_row_options;

typedef struct skd_event {
  uint64_t row;      /* what skd_session_add gave, or the prompt's index in skd_generate */
  int64_t token;     /* generated for that row */
  uint32_t layers;   /* that the deepest row of this decode step computed; of a prefill the model's depth, all anchors */
  uint32_t prefill;  /* not 0: the token came of the prompt's pass, not of a decode step */
  skd_finish finish; /* after this token */
} skd_event;

typedef struct skd_counters {
  size_t struct_size;
  uint64_t decode_steps;
  uint64_t tokens; /* generated, of all rows */
  uint64_t prefill_ns;
  uint64_t decode_ns;        /* of all decode steps */
  uint64_t decode_engine_ns; /* the part of decode_ns in calls of ONNX Runtime; on a GPU also in waiting for its tokens */
  uint64_t kv_bytes;         /* of the KV buffer */
  uint64_t graph_launches;   /* engine runs in decode steps that were CUDA graph launches */
} skd_counters;

/* Not 0 cancels the row of `event`, which is valid during this call only. Called on the thread that called skd_generate. */
typedef int (*skd_callback)(void* user, const skd_event* event);

/* "0.1.0"; static. */
SKD_API const char* skd_version(void);

/* SKD_OK for NULL. */
SKD_API skd_code skd_status_code(const skd_status* status);
/* One line, UTF-8; lives as long as the status; "" for NULL. */
SKD_API const char* skd_status_message(const skd_status* status);
SKD_API void skd_status_destroy(skd_status* status);

SKD_API skd_load_options skd_load_options_default(void);
/* Load a bundle's folder. Weights are mapped and shared by all sessions. options: may be NULL. Errors: BUNDLE (also where
 * another bundle is put in its place meanwhile: load it again), TARGET, CAPACITY. */
SKD_API skd_status* skd_bundle_load(const char* path, const skd_load_options* options, skd_bundle** bundle);
/* Fill `info`, whose struct_size the caller has set. Errors: INTERNAL. */
SKD_API skd_status* skd_bundle_get_info(const skd_bundle* bundle, skd_bundle_info* info);
SKD_API void skd_bundle_destroy(skd_bundle* bundle);

SKD_API skd_session_options skd_session_options_default(void);
/* Allocate a KV buffer and what else steps need; nothing is allocated later but bindings, once each. Errors: CAPACITY; on
 * a GPU TARGET. */
SKD_API skd_status* skd_session_create(const skd_bundle* bundle, const skd_session_options* options, skd_session** session);
SKD_API void skd_session_destroy(skd_session* session);

SKD_API skd_row_options skd_row_options_default(void);
/* Run a prompt and let its row join the next decode steps; other rows may be anywhere on their way. Its first token is delivered
 * by the next skd_session_step. Errors: CAPACITY; where an engine stops INTERNAL, on a GPU TARGET. */
SKD_API skd_status* skd_session_add(skd_session* session, const int64_t* prompt, size_t length, const skd_row_options* options,
                                    uint64_t* row);
/* Deliver the first tokens of rows that joined; where there are none, run one decode step of all rows and deliver one token a
 * row. `events` has room for max_rows; *count 0: no row is left. Rows that end are gone, their ids are not used again. Errors:
 * CAPACITY where the step has not begun; INTERNAL or TARGET where an engine stops, for want of memory too. */
SKD_API skd_status* skd_session_step(skd_session* session, skd_event* events, size_t capacity, size_t* count);
/* End a row now and free its place. Errors: CAPACITY for a row that is not there (any more). */
SKD_API skd_status* skd_session_cancel(skd_session* session, uint64_t row);
/* The logits [V] float32 that the row's newest token was chosen from; valid until the session's next call. Of a row that has
 * ended: an error. On a GPU they come to the host with this call. Errors: CAPACITY; on a GPU TARGET. */
SKD_API skd_status* skd_session_logits(const skd_session* session, uint64_t row, const float** logits);
/* Fill `counters`, whose struct_size the caller has set. Errors: INTERNAL. */
SKD_API skd_status* skd_session_get_counters(const skd_session* session, skd_counters* counters);

/* Generate for several prompts, one after another in `ids`, `lengths[i]` ids each; every token goes to `callback`. All prompts
 * are checked before anything runs. `options` may be NULL; row i samples as generator_row + i. Each call makes a session, with a
 * KV buffer, for itself: keep a session where many prompts come one after another. Errors: as skd_session_create, _add, _step. */
SKD_API skd_status* skd_generate(const skd_bundle* bundle, const int64_t* ids, const size_t* lengths, size_t rows,
                                 const skd_row_options* options, int full_depth, skd_callback callback, void* user);

/* The bundle's tokenizer; texts are split by ONNX Runtime GenAI's library, which is loaded when this is first called and
 * stays the process's one. genai_library: its path; NULL: found as the system finds libraries, or beside this one. The
 * tokenizer's files are read now. Errors: TOKENIZER (the bundle has none, or one that GenAI does not read, or in another way),
 * BUNDLE (tokenizer.json or tokenization.json is damaged; or another bundle is in its place by now: load it again), TARGET,
 * CAPACITY (out of memory). */
SKD_API skd_status* skd_tokenizer_create(const skd_bundle* bundle, const char* genai_library, skd_tokenizer** tokenizer);
SKD_API void skd_tokenizer_destroy(skd_tokenizer* tokenizer);
/* Token ids of UTF-8 text that ends with NUL, special tokens added as the checkpoint says; *ids goes back through skd_free.
 * Errors: TOKENIZER (it failed), CAPACITY (out of memory). */
SKD_API skd_status* skd_tokenizer_encode(skd_tokenizer* tokenizer, const char* text, int64_t** ids, size_t* count);
/* Text of token ids as UTF-8, special tokens left out, U+FFFD for bytes that are no character; *text ends with NUL and goes back
 * through skd_free. *length: its bytes before that NUL, since a model may write NUL itself; may be NULL.
 * Errors: CAPACITY (an id outside the vocabulary, out of memory), TOKENIZER (it failed). */
SKD_API skd_status* skd_tokenizer_decode(skd_tokenizer* tokenizer, const int64_t* ids, size_t count, char** text, size_t* length);
SKD_API void skd_free(void* memory);

#ifdef __cplusplus
}
#endif

#endif /* SKIPDECODE_SKIPDECODE_H_ */
