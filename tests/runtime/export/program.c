/* Calls the library "sample" as a program of somebody's would: threads with a context each, wrong calls, a fork. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "model.h"

enum { WIDTH = 64, ROWS = 33, TAKEN = 3 };

static mlc_model *model;
static float reference[ROWS][WIDTH];

static void fail(const char *what, const char *sentence) {
  printf("%s: %s\n", what, sentence);
  exit(1);
}

static DLTensor tensor(void *data, DLDataType dtype, int32_t rank, int64_t *shape) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = rank;
  t.dtype = dtype;
  t.shape = shape;
  return t;
}

static const DLDataType F32 = {kDLFloat, 32, 1}, I64 = {kDLInt, 64, 1};

/* One call of forward; returns its code. */
static int forward(mlc_context *context, float y[ROWS][WIDTH], int64_t *calls) {
  static float x[ROWS][WIDTH];          /* zeros: exp gives ones */
  static int64_t index[TAKEN] = {1, 9, 0};
  float rows[TAKEN][WIDTH];
  int64_t x_shape[2] = {ROWS, WIDTH}, index_shape[1] = {TAKEN}, rows_shape[2] = {TAKEN, WIDTH};
  DLTensor in[2] = {tensor(x, F32, 2, x_shape), tensor(index, I64, 1, index_shape)};
  DLTensor out[3] = {tensor(y, F32, 2, x_shape), tensor(rows, F32, 2, rows_shape), tensor(calls, I64, 0, NULL)};
  return sample_call(context, SAMPLE_FORWARD, in, out);
}

static void *work(void *unused) {
  mlc_context *context;
  float y[ROWS][WIDTH];
  int64_t calls = 0;
  (void)unused;
  if (sample_context(model, &context)) fail("context", sample_error(NULL));
  for (int k = 1; k <= 50; k++) {
    memset(y, 0, sizeof y);
    if (forward(context, y, &calls)) fail("call", sample_error(context));
    if (calls != k) fail("call", "the state of a context is not its own");
    if (memcmp(y, reference, sizeof y)) fail("call", "threads compute other numbers");
  }
  sample_close_context(context);
  return NULL;
}

/* A host's own way to run loops: one member after another. */
static void one_by_one(void *host, int32_t count, void (*member)(void *task, int32_t k), void *task) {
  ++*(int *)host;
  for (int32_t k = count - 1; k >= 0; k--) member(task, k);
}

static void wrong_calls(mlc_context *context) {
  float x[5] = {0}, y[10];
  int64_t shape[1] = {5}, wrong[1] = {9}, double_shape[1] = {10};
  DLTensor in = tensor(x, F32, 1, shape), out = tensor(y, F32, 1, wrong);
  if (sample_call(context, SAMPLE_TWICE, &in, &out) != MLC_ERROR_SIZE) fail("wrong call", "was taken");
  puts(sample_error(context));
  out.shape = double_shape;
  in.data = NULL;
  if (sample_call(context, SAMPLE_TWICE, &in, &out) != MLC_ERROR_TENSOR) fail("wrong call", "was taken");
  puts(sample_error(context));
  if (sample_call(context, 7, &in, &out) != MLC_ERROR_ARGUMENT) fail("wrong call", "was taken");
  puts(sample_error(context));
}

int main(int count, char **arguments) {
  mlc_options options = {.size = sizeof options, .threads = 3};
  mlc_context *context;
  pthread_t threads[8];
  int64_t calls, room[SAMPLE_MAX_RANK], shape[1] = {4};
  float y[ROWS][WIDTH];
  DLTensor in = tensor(NULL, F32, 1, shape), out = tensor(NULL, F32, 0, room);
  int rounds = 0, status;

  if (sample_open(count > 1 ? arguments[1] : ".", &options, &model)) fail("open", sample_error(NULL));
  if (sample_context(model, &context)) fail("context", sample_error(NULL));
  if (forward(context, reference, &calls)) fail("call", sample_error(context));
  if (sample_shapes(model, SAMPLE_TWICE, &in, &out)) fail("shapes", sample_error(NULL));
  printf("twice gives %lld\n", (long long)out.shape[0]);
  for (int k = 0; k < 8; k++)
    if (pthread_create(&threads[k], NULL, work, NULL)) fail("thread", "cannot be made");
  for (int k = 0; k < 8; k++) pthread_join(threads[k], NULL);
  wrong_calls(context);

  /* The workers are not there in the child of a fork. */
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    int bad = forward(context, y, &calls) || memcmp(y, reference, sizeof y) || calls != 2;
    sample_close_context(context);
    sample_close(model);
    _exit(bad);
  }
  waitpid(child, &status, 0);
  printf("child %d\n", status);
  sample_close_context(context);
  sample_close(model);

  options.parallel = one_by_one;
  options.host = &rounds;
  if (sample_open(count > 1 ? arguments[1] : ".", &options, &model)) fail("open", sample_error(NULL));
  if (sample_context(model, &context)) fail("context", sample_error(NULL));
  if (forward(context, y, &calls)) fail("call", sample_error(context));
  printf("the host ran %d loops%s\n", rounds, memcmp(y, reference, sizeof y) ? ", wrongly" : "");
  sample_close(model);          /* the context keeps it */
  if (forward(context, y, &calls)) fail("call", sample_error(context));
  sample_close_context(context);
  return 0;
}
