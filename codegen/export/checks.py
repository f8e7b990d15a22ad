"""What is checked of the tensors of a call, in LLVM IR. Nothing runs before all of it holds."""

from __future__ import annotations

from .constants import Constants
from .kinds import kinds_text, sizes_text
from .layouts import data_text, layouts_text


def checks_text(constants: Constants, types: int, gpu: bool = False) -> str:
    """The functions that check one tensor, and those that check all of a call; ``@types`` has so many rows."""
    one = [kinds_text(constants, types, gpu), sizes_text(constants), layouts_text(constants), data_text(constants)]
    return "".join([*one, _ALL])


_ALL = """
; Kinds, sizes, values, guards and layouts of the inputs: all that the shapes of results need.
define internal i32 @check_inputs(ptr %text, ptr %f, ptr %in, ptr %values, ptr %sizes) {
entry:
  %specs.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 1
  %specs = load ptr, ptr %specs.at
  %count.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 2
  %count = load i64, ptr %count.at
  br label %kinds
kinds:
  %k = phi i64 [ 0, %entry ], [ %k.next, %kind.fits ]
  %more = icmp ult i64 %k, %count
  br i1 %more, label %kind, label %read
kind:
  %spec = getelementptr inbounds %Spec, ptr %specs, i64 %k
  %tensor = getelementptr inbounds %Tensor, ptr %in, i64 %k
  %a = call i32 @check_kind(ptr %text, ptr %f, ptr @word_input, i64 %k, ptr %spec, ptr %tensor)
  %k.next = add i64 %k, 1
  %a.fine = icmp eq i32 %a, 0
  br i1 %a.fine, label %kind.fits, label %fail
kind.fits:
  br label %kinds
read:
  %b = call i32 @read_sizes(ptr %text, ptr %f, ptr %in, ptr %sizes)
  %b.fine = icmp eq i32 %b, 0
  br i1 %b.fine, label %compute, label %fail
compute:
  %c = call i32 @compute_values(ptr %text, ptr %f, ptr %sizes, ptr %values)
  %c.fine = icmp eq i32 %c, 0
  br i1 %c.fine, label %layouts, label %fail
layouts:
  %i = phi i64 [ 0, %compute ], [ %i.next, %layout.fits ]
  %i.more = icmp ult i64 %i, %count
  br i1 %i.more, label %layout, label %done
layout:
  %i.spec = getelementptr inbounds %Spec, ptr %specs, i64 %i
  %i.tensor = getelementptr inbounds %Tensor, ptr %in, i64 %i
  %d = call i32 @check_layout(ptr %text, ptr %f, ptr @word_input, i64 %i, ptr %i.spec, ptr %i.tensor, ptr %values)
  %i.next = add i64 %i, 1
  %d.fine = icmp eq i32 %d, 0
  br i1 %d.fine, label %layout.fits, label %fail
layout.fits:
  br label %layouts
done:
  ret i32 0
fail:
  %code = phi i32 [ %a, %kind ], [ %b, %read ], [ %c, %compute ], [ %d, %layout ]
  ret i32 %code
}

; Data of the inputs, and kinds, layouts and data of the results, which share memory with nothing.
define internal i32 @check_memory(ptr %text, ptr %f, ptr %in, ptr %out, ptr %values, ptr %inputs, ptr %results,
                                  ptr %input.ends, ptr %result.ends) {
entry:
  %specs.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 1
  %specs = load ptr, ptr %specs.at
  %count.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 2
  %count = load i64, ptr %count.at
  %out.specs.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 3
  %out.specs = load ptr, ptr %out.specs.at
  %out.count.at = getelementptr inbounds %Function, ptr %f, i32 0, i32 4
  %out.count = load i64, ptr %out.count.at
  br label %data
data:
  %k = phi i64 [ 0, %entry ], [ %k.next, %data.fits ]
  %more = icmp ult i64 %k, %count
  br i1 %more, label %one, label %outputs
one:
  %spec = getelementptr inbounds %Spec, ptr %specs, i64 %k
  %tensor = getelementptr inbounds %Tensor, ptr %in, i64 %k
  %address = getelementptr inbounds ptr, ptr %inputs, i64 %k
  %end = getelementptr inbounds ptr, ptr %input.ends, i64 %k
  %a = call i32 @check_data(ptr %text, ptr %f, ptr @word_input, i64 %k, ptr %spec, ptr %tensor, ptr %values,
                            ptr %address, ptr %end)
  %k.next = add i64 %k, 1
  %a.fine = icmp eq i32 %a, 0
  br i1 %a.fine, label %data.fits, label %fail
data.fits:
  br label %data
outputs:
  %i = phi i64 [ 0, %data ], [ %i.next, %apart ]
  %i.more = icmp ult i64 %i, %out.count
  br i1 %i.more, label %kind, label %done
kind:
  %o.spec = getelementptr inbounds %Spec, ptr %out.specs, i64 %i
  %o.tensor = getelementptr inbounds %Tensor, ptr %out, i64 %i
  %b = call i32 @check_kind(ptr %text, ptr %f, ptr @word_result, i64 %i, ptr %o.spec, ptr %o.tensor)
  %b.fine = icmp eq i32 %b, 0
  br i1 %b.fine, label %layout, label %fail
layout:
  %c = call i32 @check_layout(ptr %text, ptr %f, ptr @word_result, i64 %i, ptr %o.spec, ptr %o.tensor, ptr %values)
  %c.fine = icmp eq i32 %c, 0
  br i1 %c.fine, label %memory, label %fail
memory:
  %o.address = getelementptr inbounds ptr, ptr %results, i64 %i
  %o.end = getelementptr inbounds ptr, ptr %result.ends, i64 %i
  %d = call i32 @check_data(ptr %text, ptr %f, ptr @word_result, i64 %i, ptr %o.spec, ptr %o.tensor, ptr %values,
                            ptr %o.address, ptr %o.end)
  %d.fine = icmp eq i32 %d, 0
  br i1 %d.fine, label %inputs.apart, label %fail
inputs.apart:
  %start = load ptr, ptr %o.address
  %stop = load ptr, ptr %o.end
  %e = call i32 @check_apart(ptr %text, ptr %f, i64 %i, ptr %o.spec, ptr %start, ptr %stop, ptr @word_input,
                             i64 %count, ptr %specs, ptr %inputs, ptr %input.ends)
  %e.fine = icmp eq i32 %e, 0
  br i1 %e.fine, label %results.apart, label %fail
results.apart:
  %g = call i32 @check_apart(ptr %text, ptr %f, i64 %i, ptr %o.spec, ptr %start, ptr %stop, ptr @word_result,
                             i64 %i, ptr %out.specs, ptr %results, ptr %result.ends)
  %i.next = add i64 %i, 1
  %g.fine = icmp eq i32 %g, 0
  br i1 %g.fine, label %apart, label %fail
apart:
  br label %outputs
done:
  ret i32 0
fail:
  %code = phi i32 [ %a, %one ], [ %b, %kind ], [ %c, %layout ], [ %d, %memory ], [ %e, %inputs.apart ],
                  [ %g, %results.apart ]
  ret i32 %code
}
"""
