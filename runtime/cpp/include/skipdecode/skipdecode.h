/* skipdecode.h: load a bundle that skip-export wrote and generate tokens with it. C99; no exception leaves the library.
 *
 * Errors: every function that can fail returns a skd_status*. NULL means success. Otherwise the status holds a code and
 * a one-line message (what, where, what to do), and the caller releases it with skd_status_destroy. A function that
 * fails leaves its outputs untouched. Below, "Errors:" lists the codes that a function may return, without the prefix
 * SKD_ERROR_. Each of these functions also returns ARGUMENT for an argument that is NULL, too small, or has a wrong
 * struct_size, which is a bug in the caller.
 *
 * After skd_session_add, _begin, _step or _cancel has failed with CAPACITY or ARGUMENT, the session is unchanged; after
 * skd_session_prefill has failed with CAPACITY, the row that it was for is gone, and nothing else has changed. After any
 * other code destroy the session, because its rows may be half a step ahead.
 *
 * Ownership: what a *_create, _load, _encode or _decode function returns belongs to the caller, who releases it with
 * the matching *_destroy or with skd_free. These accept NULL and may be called from any thread. Arguments have to stay
 * valid during the call only. A session or a tokenizer keeps alive what it needs of its bundle, so handles may be
 * destroyed in any order. On a GPU, destroy all of them before main returns: CUDA's libraries are gone after that.
 *
 * Threads: a bundle may be used by any number of threads at once. A session may be used by one thread at a time;
 * sessions of one bundle run concurrently, on a GPU taking turns on one stream. A tokenizer may be shared; its calls
 * take turns. A status may be used by whoever received it. Loading a bundle and destroying the last handle that keeps a
 * bundle alive wait for each other.
 *
 * Options: fill a struct with its *_default() function, which sets struct_size, and change what should differ. The
 * defaults are in parentheses below. A NULL options pointer means the defaults.
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

typedef struct skd_status skd_status;       /* why a call failed */
typedef struct skd_bundle skd_bundle;       /* a loaded bundle: weights and engines, immutable */
typedef struct skd_session skd_session;     /* rows that decode together, with their KV buffer */
typedef struct skd_tokenizer skd_tokenizer; /* text to token ids and back */

typedef enum skd_code {
  SKD_OK = 0,
  SKD_ERROR_BUNDLE = 1,    /* the bundle is missing, damaged, edited or of another format version */
  SKD_ERROR_TARGET = 2,    /* a library that is missing or of a wrong version, an unsuitable CPU, a missing or failing GPU */
  SKD_ERROR_CAPACITY = 3,  /* no room for so many rows or tokens, out of memory, an id or value out of range */
  SKD_ERROR_SCHEDULE = 4,  /* an invalid schedule; one in bundle.json is SKD_ERROR_BUNDLE */
  SKD_ERROR_INTERNAL = 5,  /* an engine that failed on the CPU, or a bug in this library */
  SKD_ERROR_TOKENIZER = 6, /* the bundle has no tokenizer, or none that this library can use: pass token ids */
  SKD_ERROR_ARGUMENT = 7   /* a bug in the caller: an argument that is NULL, too small, or has a wrong struct_size */
} skd_code;

typedef enum skd_finish {
  SKD_FINISH_NONE = 0,  /* the row continues */
  SKD_FINISH_STOP = 1,  /* the token is one of the model's end-of-sequence tokens */
  SKD_FINISH_LENGTH = 2 /* max_new_tokens is reached */
} skd_finish;

typedef struct skd_load_options {
  size_t struct_size;
  /* Where engines run: "cpu" or "cuda" (the first GPU). NULL: the first of these that the bundle has. (NULL) */
  const char* target;
  /* Size of ONNX Runtime's thread pool, up to 1024; 0: one thread for each usable core. (0) */
  uint32_t threads;
  /* Path of libonnxruntime; for "cuda", of onnxruntime-gpu's. NULL: look next to this library, then where the system
   * looks for libraries. (NULL) A process has one ONNX Runtime and one thread pool: those of the first load that finds
   * the library fit for its bundle. Later loads ignore this field and `threads`. */
  const char* onnxruntime_library;
  /* Not 0: on a GPU, call every engine instead of launching CUDA graphs. (0) */
  uint32_t no_cuda_graphs;
} skd_load_options;

typedef struct skd_bundle_info {
  size_t struct_size;
  const char* name;  /* the model's; valid until the bundle is destroyed */
  const char* dtype; /* of the source weights: "float32", "float16" or "bfloat16"; valid as long as name */
  uint32_t num_layers, num_variants, num_segments;
  uint64_t vocab_size;
  uint64_t max_length; /* most tokens of a row, prompt and generated together */
  uint64_t max_batch;  /* most rows of a session */
  double mean_layers;  /* active layers, averaged over the schedule's span */
  double load_s;       /* seconds that loading took */
} skd_bundle_info;

/* What a session has room for. Its KV buffer is allocated for max_rows rows of that many tokens. */
typedef struct skd_session_options {
  size_t struct_size;
  uint32_t max_rows;          /* rows at the same time, 1 .. max_batch (1) */
  uint32_t max_prompt_tokens; /* most prompt tokens of a row; 0: half of the bundle's max_length (0) */
  uint32_t max_new_tokens;    /* most generated tokens of a row; 0: what max_prompt_tokens leaves of max_length (0) */
  uint32_t full_depth;        /* not 0: compute every layer at every position, the baseline (0) */
  /* Another schedule than the bundle's: how many layers each position computes. Positions after `num_positions` keep the
   * last count. Counts must not rise, nor cut through a segment of the bundle; anchor and warm-up layers are the bundle's.
   * NULL: the bundle's schedule, or full depth. Not together with full_depth. (NULL) */
  const uint32_t* layers;
  size_t num_positions; /* numbers in `layers` (0) */
} skd_session_options;

/* How a row generates. */
typedef struct skd_row_options {
  size_t struct_size;
  uint32_t max_new_tokens; /* 1 .. the session's max_new_tokens (64) */
  uint32_t do_sample;      /* 0: greedy, and the next five fields are ignored (0) */
  double temperature;      /* above 0 (1) */
  uint32_t top_k;          /* how many of the likeliest tokens to choose from; 0: all (0) */
  double top_p;            /* choose from the likeliest tokens that reach this probability mass, in (0, 1]; 1: all (1) */
  uint64_t seed;           /* tokens follow from seed, generator_row and step: splitmix64, as in Python (0) */
  uint32_t generator_row;  /* to repeat a row of a Python batch: its index there (0) */
  uint32_t ignore_eos;     /* not 0: continue after end-of-sequence tokens, for measurements (0) */
} skd_row_options;

/* One generated token. */
typedef struct skd_event {
  uint64_t row;      /* the id that skd_session_add or _begin returned, or the prompt's index in skd_generate */
  int64_t token;     /* the token generated for that row */
  uint32_t layers;   /* layers that the deepest row of this decode step computed; num_layers for a prefill, with any anchor */
  uint32_t prefill;  /* not 0: the token comes from the prefill, not from a decode step */
  skd_finish finish; /* whether the row ends with this token */
} skd_event;

/* Totals of a session since it was created. Times are in nanoseconds, sizes in bytes. */
typedef struct skd_counters {
  size_t struct_size;
  uint64_t decode_steps;
  uint64_t tokens;           /* generated, by all rows, prefills included */
  uint64_t prefill_ns;       /* in skd_session_add, _begin and _prefill */
  uint64_t decode_ns;        /* in decode steps */
  uint64_t decode_engine_ns; /* the part of decode_ns spent in ONNX Runtime; on a GPU also waiting for the tokens */
  uint64_t kv_bytes;         /* size of the KV buffer */
  uint64_t graph_launches;   /* engine runs in decode steps that were CUDA graph launches */
} skd_counters;

/* Receives one token of skd_generate, on the thread that called it. `event` is valid during this call only; `user` is
 * what was given to skd_generate. Return 0 to go on, anything else to cancel the event's row. */
typedef int (*skd_callback)(void* user, const skd_event* event);

/* The library's version, "0.1.0"; a static string. */
SKD_API const char* skd_version(void);

/* The code of a status; SKD_OK for NULL. */
SKD_API skd_code skd_status_code(const skd_status* status);
/* The message of a status: one line of UTF-8, valid until the status is destroyed; "" for NULL. */
SKD_API const char* skd_status_message(const skd_status* status);
SKD_API void skd_status_destroy(skd_status* status);

SKD_API skd_load_options skd_load_options_default(void);
/* Load the bundle in the folder `path`. Its weights are mapped into memory and shared by all of its sessions.
 * Errors: BUNDLE (also if another bundle takes its place during the load: load it again), TARGET, CAPACITY. */
SKD_API skd_status* skd_bundle_load(const char* path, const skd_load_options* options, skd_bundle** bundle);
/* Fill *info, whose struct_size the caller has set to sizeof(skd_bundle_info). */
SKD_API skd_status* skd_bundle_get_info(const skd_bundle* bundle, skd_bundle_info* info);
/* Release a bundle's handle. Its engines and weights go with the last session or tokenizer that uses them. */
SKD_API void skd_bundle_destroy(skd_bundle* bundle);

SKD_API skd_session_options skd_session_options_default(void);
/* Create a session without rows. This allocates its KV buffer and all else that decode steps need, except bindings:
 * each of these is allocated once, when a step first needs it.
 * Errors: CAPACITY; SCHEDULE (`layers` is malformed, or does not fit the bundle); ARGUMENT (`layers` and `full_depth` are
 * both given); on a GPU also TARGET. */
SKD_API skd_status* skd_session_create(const skd_bundle* bundle, const skd_session_options* options, skd_session** session);
/* End all rows and release the session. */
SKD_API void skd_session_destroy(skd_session* session);

SKD_API skd_row_options skd_row_options_default(void);
/* Run the prefill of a prompt, `length` token ids, as a new row that joins the next decode step, however far the other
 * rows are. *row is its id, unique in the session. The next skd_session_step delivers its first token.
 * Errors: CAPACITY (also if all max_rows are in use), INTERNAL if an engine fails on the CPU, TARGET if one fails on a GPU,
 * ARGUMENT while a prompt that skd_session_begin has begun is under way. */
SKD_API skd_status* skd_session_add(skd_session* session, const int64_t* prompt, size_t length, const skd_row_options* options,
                                    uint64_t* row);
/* As skd_session_add, but the prefill runs in parts, by skd_session_prefill, so that the other rows need not wait for all
 * of it: between two parts they may step, and end. One prompt at a time can be under way, and no row can be added
 * meanwhile. In a session's last free place, a schedule with anchor "absolute" runs the prompt here, as a whole.
 * Errors: those of skd_session_add. */
SKD_API skd_status* skd_session_begin(skd_session* session, const int64_t* prompt, size_t length, const skd_row_options* options,
                                      uint64_t* row);
/* Run the next part of the prefill that skd_session_begin has begun: at most as much work as a prompt of `tokens` tokens is.
 * Few tokens make many small passes, each of which reads its layers' weights. 0: 64 on a CPU, 512 on a GPU. *joined is not
 * 0 once the row has joined the others, or if no prefill has begun. skd_session_cancel ends a prefill between two parts.
 * Errors: those of skd_session_add. */
SKD_API skd_status* skd_session_prefill(skd_session* session, uint32_t tokens, int* joined);
/* Deliver the first tokens of rows that joined since the last call. If there are none, run one decode step of all
 * rows and deliver one token a row. `events` is the caller's array of `capacity` events, at least max_rows. *count of
 * them are filled; 0 means that no row is left, but for one whose prompt is under way. A row leaves the session with the
 * event whose `finish` is not SKD_FINISH_NONE; its id is not used again.
 * Errors: CAPACITY (the step did not begin), INTERNAL (an engine failed on the CPU), TARGET (an engine failed on a GPU,
 * or memory ran out during the step). */
SKD_API skd_status* skd_session_step(skd_session* session, skd_event* events, size_t capacity, size_t* count);
/* End a row now and free its place.
 * Errors: CAPACITY (the session does not have this row, or no longer); on a GPU also TARGET. */
SKD_API skd_status* skd_session_cancel(skd_session* session, uint64_t row);
/* Get the logits, V values in float32, that a row's newest token was chosen from. *logits belongs to the session and is
 * valid until the session's next call. On a GPU, this call copies the logits to the host.
 * Errors: CAPACITY (the session does not have this row, or no longer); on a GPU also TARGET. The call only reads, so a
 * failure leaves the session unchanged. After TARGET the GPU's work has failed, though: destroy the session. */
SKD_API skd_status* skd_session_logits(const skd_session* session, uint64_t row, const float** logits);
/* Fill *counters, whose struct_size the caller has set to sizeof(skd_counters). */
SKD_API skd_status* skd_session_get_counters(const skd_session* session, skd_counters* counters);

/* Generate for `rows` prompts and return when all of them have ended. `ids` holds the prompts one after another,
 * lengths[i] token ids for prompt i. Every token goes to `callback`, with `user`. All prompts are checked before
 * anything runs. Row i samples with generator_row + i. full_depth: as in skd_session_options. Each call creates its own
 * session, KV buffer included; to run many prompts one after another, keep a session instead.
 * Errors: those of skd_session_create, _add and _step. */
SKD_API skd_status* skd_generate(const skd_bundle* bundle, const int64_t* ids, const size_t* lengths, size_t rows,
                                 const skd_row_options* options, int full_depth, skd_callback callback, void* user);

/* Create the bundle's tokenizer; its files are read now. Text is split by ONNX Runtime GenAI's library, which the first
 * call loads for the rest of the process. genai_library: its path, ignored by later calls; NULL: look next to this
 * library, then where the system looks for libraries.
 * Errors: TOKENIZER (the bundle has none, or one that GenAI cannot read or applies differently from Hugging Face),
 * BUNDLE (tokenizer.json or tokenization.json is damaged, or another bundle has taken its place since it was loaded:
 * load it again), TARGET (no usable library), CAPACITY (out of memory). */
SKD_API skd_status* skd_tokenizer_create(const skd_bundle* bundle, const char* genai_library, skd_tokenizer** tokenizer);
SKD_API void skd_tokenizer_destroy(skd_tokenizer* tokenizer);
/* Turn NUL-terminated UTF-8 text into *count token ids, with the special tokens that the checkpoint adds. *ids is
 * released with skd_free.
 * Errors: TOKENIZER (GenAI fails), CAPACITY (out of memory). */
SKD_API skd_status* skd_tokenizer_encode(skd_tokenizer* tokenizer, const char* text, int64_t** ids, size_t* count);
/* Turn `count` token ids into UTF-8 text, without special tokens and with U+FFFD for bytes that are not a character.
 * *text is NUL-terminated and released with skd_free. *length is its size in bytes without the terminator, because a
 * model may generate NUL too; `length` may be NULL.
 * Errors: CAPACITY (an id outside the vocabulary, out of memory), TOKENIZER (GenAI fails). */
SKD_API skd_status* skd_tokenizer_decode(skd_tokenizer* tokenizer, const int64_t* ids, size_t count, char** text, size_t* length);
/* Release the ids or the text that a tokenizer returned. */
SKD_API void skd_free(void* memory);

#ifdef __cplusplus
}
#endif

#endif /* SKIPDECODE_SKIPDECODE_H_ */
