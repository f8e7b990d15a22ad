/* Calls a function of a library with the tensors of a file, twice, and writes the results of both calls to another.
   The file: how many tensors; of each code, bits and number of dimensions of its type, dimensions, elements. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "model.h"

static size_t bytes_of(const DLTensor *t) {
  size_t n = t->dtype.bits / 8;
  for (int d = 0; d < t->ndim; ++d) n *= (size_t)t->shape[d];
  return n;
}

static int fail(const char *what, const char *why) {
  printf("%s: %s\n", what, why);
  return 1;
}

int main(int count, char **arguments) {
  mlc_model *model;
  mlc_context *context;
  if (count != 5) return fail("runner", "folder, function, file of inputs, file of results");
  mlc_options options = {.size = sizeof options, .threads = 2, .verify = 1};
  if (arm_open(arguments[1], &options, &model)) return fail("open", arm_error(NULL));
  if (arm_context(model, &context)) return fail("context", arm_error(NULL));
  FILE *in = fopen(arguments[3], "rb"), *out = fopen(arguments[4], "wb");
  int32_t inputs, kind[3];
  if (!in || !out || fread(&inputs, 4, 1, in) != 1) return fail("runner", "no inputs");
  DLTensor given[16] = {0}, made[16] = {0};
  for (int k = 0; k < inputs; ++k) {
    if (fread(kind, 4, 3, in) != 3) return fail("runner", "too few inputs");
    given[k] = (DLTensor){.device = {kDLCPU, 0}, .ndim = kind[2], .dtype = {(uint8_t)kind[0], (uint8_t)kind[1], 1}};
    given[k].shape = malloc(8 * (size_t)kind[2] + 8);
    if (fread(given[k].shape, 8, (size_t)kind[2], in) != (size_t)kind[2]) return fail("runner", "too few sizes");
    given[k].data = malloc(bytes_of(&given[k]) + 1);
    if (fread(given[k].data, 1, bytes_of(&given[k]), in) != bytes_of(&given[k])) return fail("runner", "too few elements");
  }
  for (int k = 0; k < 16; ++k) made[k].shape = malloc(8 * ARM_MAX_RANK + 8);
  int function = atoi(arguments[2]), results = 0;
  if (arm_shapes(model, function, given, made)) return fail("shapes", arm_error(NULL));
  while (results < 16 && made[results].dtype.lanes) ++results;
  for (int k = 0; k < results; ++k) made[k].data = malloc(bytes_of(&made[k]) + 1);
  for (int turn = 0; turn < 2; ++turn) {
    if (arm_call(context, function, given, made)) return fail("call", arm_error(context));
    for (int k = 0; k < results; ++k) fwrite(made[k].data, 1, bytes_of(&made[k]), out);
  }
  fclose(out);
  arm_close_context(context);
  arm_close(model);
  puts("done");
  return 0;
}
