/* Four threads call the library "sample" while a fifth forks again and again, also in the middle of their loops. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "model.h"

enum { WIDTH = 64, ROWS = 40, CALLERS = 4 };

static mlc_model *model;
static float reference[ROWS][WIDTH];
static long calls_of_each;
static volatile int stop;

static int forward(mlc_context *context, float y[ROWS][WIDTH]) {
  static float x[ROWS][WIDTH];
  static int64_t index[1] = {1};
  float rows[1][WIDTH];
  int64_t calls, shape[2] = {ROWS, WIDTH}, one[1] = {1}, rows_shape[2] = {1, WIDTH};
  DLTensor in[2] = {{x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0},
                    {index, {kDLCPU, 0}, 1, {kDLInt, 64, 1}, one, NULL, 0}};
  DLTensor out[3] = {{y, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0},
                     {rows, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, rows_shape, NULL, 0},
                     {&calls, {kDLCPU, 0}, 0, {kDLInt, 64, 1}, NULL, NULL, 0}};
  memset(y, 0, sizeof(float[ROWS][WIDTH]));
  return sample_call(context, SAMPLE_FORWARD, in, out);
}

static int wrong(mlc_context *context) {
  float y[ROWS][WIDTH];
  return forward(context, y) || memcmp(y, reference, sizeof y);
}

static void *caller(void *unused) {
  mlc_context *context;
  (void)unused;
  if (sample_context(model, &context)) exit(3);
  for (long k = 0; k < calls_of_each; k++) {
    if (wrong(context)) exit(4);
    if (k % 7 == 0) usleep(k % 300);    /* so that workers fall asleep */
  }
  sample_close_context(context);
  return NULL;
}

static void *forker(void *unused) {
  (void)unused;
  while (!stop) {
    int status;
    pid_t child = fork();
    if (child == 0) {
      mlc_context *context;
      alarm(60);                        /* a child that waits for workers that are not there */
      if (sample_context(model, &context)) _exit(5);
      for (int k = 0; k < 3; k++)
        if (wrong(context)) _exit(6);
      sample_close_context(context);
      _exit(0);
    }
    waitpid(child, &status, 0);
    if (status) exit(7);
    usleep(1000);
  }
  return NULL;
}

int main(int count, char **arguments) {
  mlc_options options = {.size = sizeof options, .threads = count > 2 ? atoi(arguments[2]) : 2};
  pthread_t callers[CALLERS], forking;
  mlc_context *context;
  calls_of_each = count > 3 ? atol(arguments[3]) : 100;
  for (int round = 0; round < 3; round++) {
    if (sample_open(arguments[1], &options, &model) || sample_context(model, &context)) return 1;
    if (forward(context, reference)) return 2;
    stop = 0;
    for (int k = 0; k < CALLERS; k++) pthread_create(&callers[k], NULL, caller, NULL);
    pthread_create(&forking, NULL, forker, NULL);
    for (int k = 0; k < CALLERS; k++) pthread_join(callers[k], NULL);
    stop = 1;
    pthread_join(forking, NULL);
    sample_close_context(context);
    sample_close(model);
  }
  for (int k = 0; k < 50; k++) {        /* workers come and go */
    if (sample_open(arguments[1], &options, &model) || sample_context(model, &context)) return 8;
    if (wrong(context)) return 9;
    sample_close_context(context);
    sample_close(model);
  }
  puts("right");
  return 0;
}
