"""The words by which a native host program knows the process that it runs in.

A *table* of 64-bit words is what code is given of the process it runs in, so that code itself has no address in it:
first ``WORDS`` (objects and numbers), then ``FUNCTIONS`` of Python and torch, ``SUPPORT_FUNCTIONS``, and then what one
program asks for. A *frame* is the words that one run of a program works with: three a tensor (where the ``at::Tensor``
is, the same once more if the run owns it, the address of the data), then the objects that the run holds, then their
values as integers. *Codes* say how frames and Python's objects correspond, ``kind << 32 | word``.
"""

from __future__ import annotations

# How a value of a program is handed to Python, or taken from it.
TENSOR, OBJECT, SIZE, NOTHING = range(4)
# What an argument of a program is: bits of its description, and the power of two that is the size of an element.
IS_TENSOR, IS_SIZE, DIES, UNUSED = 1, 2, 4, 8
ELEMENT_SHIFT = 4
# A tensor without an address, above the three bits of the shift.
OPAQUE = 128

WORDS = (
    "Tensor",
    "Parameter",
    "offset",
    "NotImplemented",
    "None",
    "OutOfRangeError",
    "DivisionByZeroError",
    "TypeError",
)

WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE"
FUNCTIONS = (
    "PyList_Size", "PyList_GetItem", "PyList_SetSlice", "Py_IncRef", "Py_DecRef", "PyLong_AsLongLong",
    "PyLong_FromLongLong", "PyErr_Occurred", "PyErr_Clear", "PyErr_Format", "PyEval_SaveThread",
    "PyEval_RestoreThread", "PyTuple_New", "PyTuple_SetItem", "PyTuple_GetItem", "PyObject_Vectorcall",
    "PyType_IsSubtype", WRAP, "aoti_torch_get_data_ptr", "aoti_torch_get_numel", "aoti_torch_get_storage_size",
    "aoti_torch_get_storage_offset", "aoti_torch_get_sizes", "aoti_torch_get_strides", "aoti_torch_empty_strided",
    "aoti_torch_new_tensor_handle", "aoti_torch_delete_tensor_object", "aoti_torch__reinterpret_tensor",
    "aoti_torch_get_dtype",
)  # fmt: skip
SUPPORT_FUNCTIONS = (
    "mlc_enter", "mlc_leave", "mlc_drop", "mlc_make", "mlc_view", "mlc_layout", "mlc_dtype", "mlc_part", "mlc_outside",
    "mlc_results", "mlc_find", "mlc_launch", "mlc_context",
)  # fmt: skip

_PLACE = {name: k for k, name in enumerate((*WORDS, *FUNCTIONS, *SUPPORT_FUNCTIONS))}
OWN = len(_PLACE)
"""The first word of the table that is a program's own."""


def place(name: str) -> int:
    """The word of the table that holds an object, a number or a function."""
    return _PLACE[name]
