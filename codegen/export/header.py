"""``model.h``: the interface of a library for C."""

from __future__ import annotations

from .codes import CODES
from .library import ExportedFunction, ExportedModel, TensorSpec

_TELLS = {
    "argument": "a null pointer, a function that is not there, a context in use",
    "tensor": "rank, type, device, strides, data or overlap of a tensor",
    "size": "a dimension, or what has to hold of sizes",
    "index": "data hold an index out of range, or divide integers by zero;\n"
    "                           results, and state that calls change, are worth nothing then",
    "file": "model.safetensors is missing, damaged or another model's",
    "processor": "this processor lacks instructions that the library uses",
    "memory": "the system has no memory left, or the GPU",
    "device": "there is no such GPU or no driver, or the driver refused something",
    "library": "the library of products cannot be loaded, or lacks a function",
}

_DLPACK = """
/* Structures of DLPack (https://dmlc.github.io/dlpack). Include its own header first, if you use both. */
#if !defined(DLPACK_DLPACK_H_) && !defined(MLC_DLPACK)
#define MLC_DLPACK
typedef struct { int32_t device_type; int32_t device_id; } DLDevice;    /* 1 is the CPU, 2 a GPU */
typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides;             /* in elements; NULL: dense rows */
  uint64_t byte_offset;
} DLTensor;
enum { kDLCPU = 1, kDLCUDA = 2, kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLComplex = 5, kDLBool = 6 };
#endif
"""

_OPTIONS = """
#ifndef MLC_OPTIONS
#define MLC_OPTIONS
typedef struct mlc_model mlc_model;             /* weights and threads: one for all threads of the program */
typedef struct mlc_context mlc_context;         /* scratch, and copies of what calls change: one for each thread */

typedef struct {
  uint32_t size;                /* sizeof(mlc_options); what is behind host may be left out of it */
  int32_t threads;              /* of the model, the calling one included; 0: as many as it may use processors */
  /* NULL, or what runs the loops of the model in place of threads of its own: it has to call member(task, k) once for
     each k from 0 to count - 1, on any threads, and return when all have returned. */
  void (*parallel)(void *host, int32_t count, void (*member)(void *task, int32_t k), void *task);
  void *host;                   /* handed to parallel */
  int32_t device;               /* the number of the GPU, of a model for GPUs */
  int32_t verify;               /* not 0: all data of the weights are read, and compared with those of the export */
  /* Of a model that multiplies by a library: its name or path, for dlopen, or the functions themselves, cblas_sgemm and
     cblas_dgemm, whose sizes are int. */
  const char *cblas;
  void (*sgemm)(void);
  void (*dgemm)(void);
} mlc_options;
enum {
CODES
};
#endif
"""

_FUNCTIONS = """
/* Open the model in a folder, which has to hold model.safetensors; options may be NULL. All functions return MLC_OK or
   another code, with a sentence from NAME_error. */
int NAME_open(const char *folder, const mlc_options *options, mlc_model **model);

/* A context, in its first state. Each call of a context sees what its calls before have changed. */
int NAME_context(mlc_model *model, mlc_context **context);

/* What the results of a call with these inputs will be: writes type, rank, shape and, where strides is no NULL,
   strides. out[k].shape has to have room for NAME_UPPER_MAX_RANK numbers. Data of the inputs may be NULL. */
int NAME_shapes(mlc_model *model, int function, const DLTensor *in, DLTensor *out);

/* Call a function. Results go to the memory of out, which may share none with the inputs. Everything is checked before
   anything runs. Different contexts may be called at the same time. The calling thread needs 256 KiB of stack. */
int NAME_call(mlc_context *context, int function, const DLTensor *in, DLTensor *out);

/* What the last failure of the context was; with NULL the last one of this thread that was no context's, among them
   calls of a context that is in another call. The text stays until the next call. */
const char *NAME_error(const mlc_context *context);

/* Functions, tensors and sizes as JSON. */
const char *NAME_signature(void);

STREAMSEED/* The model ends with the last of its contexts, and its threads with it: before a dlclose of the library. */
void NAME_close_context(mlc_context *context);
void NAME_close(mlc_model *model);
"""


_STREAM = """
/* Let calls of a context go to a stream of the caller's (CUstream; NULL is the default one), in its order. Such calls
   do not wait, and what their kernels do wrong is told by a later call. Without this a context has a stream of its own,
   for which each call waits. What went to the stream before is waited for here. */
int NAME_stream(mlc_context *context, void *stream);

"""


_SEED = """
/* Begin the random numbers of a context anew, with a seed. A new context has the seed 0. Equal seeds give equal numbers
   in the same order of calls. Not while a call of the context runs. */
int NAME_seed(mlc_context *context, uint64_t seed);

"""


def header_text(model: ExportedModel) -> str:
    """The header of a library."""
    name, upper = model.name, model.name.upper()
    codes = [
        f"  MLC_{'OK' if key == 'ok' else 'ERROR_' + key.upper()} = {number}"
        + ("," if number < len(CODES) - 1 else "")
        + (f"  /* {_TELLS[key]} */" if key in _TELLS else "")
        for key, number in CODES.items()
    ]
    ranks = [len(s.shape) for f in model.functions for s in (*f.inputs, *f.results)]
    return "\n".join([
        f"/* {name}: a model as a library. Made by torch-mlc. */",
        f"#ifndef {upper}_H",
        f"#define {upper}_H",
        "#include <stdint.h>",
        _DLPACK.rstrip(),
        _OPTIONS.replace("CODES", "\n".join(codes)),
        "#ifdef __cplusplus",
        'extern "C" {',
        "#endif",
        "",
        f"enum {{ {upper}_MAX_RANK = {max([*ranks, 1])} }};",
        "",
        *(line for k, f in enumerate(model.functions) for line in _function(upper, k, f)),
        _functions(model, name, upper),
        "#ifdef __cplusplus",
        "}",
        "#endif",
        "#endif",
        "",
    ])  # fmt: skip


def _functions(model: ExportedModel, name: str, upper: str) -> str:
    text = _FUNCTIONS.replace("STREAM", _STREAM.lstrip() if model.gpus else "")
    text = text.replace("SEED", _SEED.lstrip() if model.draws else "")
    return text.replace("NAME_UPPER", upper).replace("NAME", name)


def _function(upper: str, number: int, f: ExportedFunction) -> list[str]:
    own = f"{upper}_{f.name.upper()}"
    return [
        f"/* {f.name}",
        *(f"     in[{k}]   {_tensor(s)}" for k, s in enumerate(f.inputs)),
        *(f"     out[{k}]  {_tensor(s)}" for k, s in enumerate(f.results)),
        *(f"   {g.sentence}" for g in f.guards),
        "*/",
        f"enum {{ {own} = {number}, {own}_INPUTS = {len(f.inputs)}, {own}_RESULTS = {len(f.results)} }};",
        "",
    ]


def _tensor(s: TensorSpec) -> str:
    shape = ", ".join(map(str, s.shape))
    return f"{s.name}: {s.dtype.value}[{shape}]".replace("*/", "* /")
