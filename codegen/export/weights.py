"""Weights of a library, in LLVM IR: ``model.safetensors`` is mapped, compared with what the library was made for, and
its tensors are addresses in it.

The format is an int64 with the bytes of a header, that header as JSON, then data. The library knows the length of the
file and a hash of its header (FNV-1a of 64 bits): enough to tell a damaged or foreign file, and no protection against
people who mean to deceive it. Of the data it has a hash too, with which they are compared where the caller asks for it:
that reads all of them, and another checkpoint has another.
"""

from __future__ import annotations

from .constants import Constants
from .routine import Routine


def header_hash(header: bytes) -> int:
    """FNV-1a, 64 bits."""
    h = 0xCBF29CE484222325
    for byte in header:
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def signed(value: int) -> int:
    """A number of 64 bits as LLVM writes it."""
    return value - (1 << 64) if value >= 1 << 63 else value


_PRIME = 0x100000001B3
HASH_DATA = f"""
; A hash of data, of which there are a multiple of 64 bytes: eight of FNV-1a's kind side by side, over words of 64 bits,
; whose upper halves are mixed into the lower ones.
define i64 @hash_data(ptr %data, i64 %count) {{
entry:
  br label %each
each:
  %k = phi i64 [ 0, %entry ], [ %k.next, %block ]
  %h = phi <8 x i64> [ splat (i64 {signed(0xCBF29CE484222325)}), %entry ], [ %h.next, %block ]
  %more = icmp ult i64 %k, %count
  br i1 %more, label %block, label %fold
block:
  %at = getelementptr inbounds i8, ptr %data, i64 %k
  %words = load <8 x i64>, ptr %at, align 8
  %other = xor <8 x i64> %h, %words
  %product = mul <8 x i64> %other, splat (i64 {_PRIME})
  %upper = lshr <8 x i64> %product, splat (i64 32)
  %h.next = xor <8 x i64> %product, %upper
  %k.next = add i64 %k, 64
  br label %each
fold:
  br label %lane
lane:
  %i = phi i64 [ 0, %fold ], [ %i.next, %lane ]
  %all = phi i64 [ %count, %fold ], [ %all.next, %lane ]
  %one = extractelement <8 x i64> %h, i64 %i
  %joined = xor i64 %all, %one
  %scaled = mul i64 %joined, {_PRIME}
  %high = lshr i64 %scaled, 32
  %all.next = xor i64 %scaled, %high
  %i.next = add i64 %i, 1
  %again = icmp ult i64 %i.next, 8
  br i1 %again, label %lane, label %done
done:
  ret i64 %all.next
}}
"""


def data_hash_text(first: int, data_bytes: int, data_hash: int) -> str:
    """``@compare_data``: whether a mapped file has the data with that hash."""
    return (
        HASH_DATA.replace("define i64", "define internal i64")
        + f"""
define internal i1 @compare_data(ptr %mapped) {{
  %data = getelementptr inbounds i8, ptr %mapped, i64 {first}
  %hash = call i64 @hash_data(ptr %data, i64 {data_bytes})
  %same = icmp eq i64 %hash, {signed(data_hash)}
  ret i1 %same
}}
"""
    )


DECLARATIONS = """
declare i32 @open(ptr, i32, ...)
declare i32 @close(i32)
declare i64 @lseek(i32, i64, i32)
declare ptr @mmap(ptr, i64, i32, i32, i32, i64)
declare i32 @munmap(ptr, i64)
declare i64 @strlen(ptr)
"""


def _point_to_weights(count: int) -> str:
    r = Routine()
    with r.each(count, "weight") as k:
        offset = r.load("i64", "%Weight", r.item("%Weight", "@weights", k), 0)
        r.store("ptr", r.value(f"getelementptr inbounds i8, ptr %mapped, i64 {offset}"), "ptr", "%places", k)
    r.line("ret void")
    return r.text(
        "\n; The addresses of all weights in a file that is mapped, or in a copy of it.\n"
        "define internal void @point_to_weights(ptr %mapped, ptr %places)"
    )


def weights_text(constants: Constants, header: bytes, data_bytes: int, count: int) -> str:
    """``@map_weights`` and ``@point_to_weights`` for a file with ``header`` and so many bytes of data."""
    t = constants.text
    places = _point_to_weights(count)
    length = 8 + len(header) + data_bytes
    return (
        places
        + f"""
; Map the file of weights in "folder". Its address, or null with a sentence in "text".
define internal ptr @map_weights(ptr %text, ptr %folder) {{
entry:
  %count = call i64 @strlen(ptr %folder)
  %room = add i64 %count, 32
  %path = call ptr @malloc(i64 %room)
  %no.path = icmp eq ptr %path, null
  br i1 %no.path, label %memory, label %name
memory:
  %m = call i32 (ptr, i64, ptr, ...) @snprintf(ptr %text, i64 1024, ptr {t("no memory for the name of a file")})
  ret ptr null
name:
  %n = call i32 (ptr, i64, ptr, ...) @snprintf(ptr %path, i64 %room, ptr {t("%s/model.safetensors")}, ptr %folder)
  %file = call i32 (ptr, i32, ...) @open(ptr %path, i32 524288)
  %no.file = icmp slt i32 %file, 0
  br i1 %no.file, label %unopened, label %measure
unopened:
  %u = call i32 (ptr, i64, ptr, ...) @snprintf(ptr %text, i64 1024, ptr {t("cannot open %s: %m")}, ptr %path)
  call void @free(ptr %path)
  ret ptr null
measure:
  %length = call i64 @lseek(i32 %file, i64 0, i32 2)
  %whole = icmp eq i64 %length, {length}
  br i1 %whole, label %map, label %short
short:
  %s = call i32 (ptr, i64, ptr, ...) @snprintf(ptr %text, i64 1024, ptr {
            t("%s has %lld bytes, and this library was made for a file of %lld: it is another model's, or not complete")
        }, ptr %path, i64 %length, i64 {length})
  br label %fail
map:
  %data = call ptr @mmap(ptr null, i64 {length}, i32 1, i32 2, i32 %file, i64 0)
  %bad = icmp eq ptr %data, inttoptr (i64 -1 to ptr)
  br i1 %bad, label %unmapped, label %check
unmapped:
  %v = call i32 (ptr, i64, ptr, ...) @snprintf(ptr %text, i64 1024, ptr {t("cannot map %s: %m")}, ptr %path)
  br label %fail
check:
  %header.bytes = load i64, ptr %data
  %right = icmp eq i64 %header.bytes, {len(header)}
  br i1 %right, label %hash, label %foreign
hash:
  %header = getelementptr inbounds i8, ptr %data, i64 8
  %code = call i64 @hash_of(ptr %header, i64 {len(header)})
  %same = icmp eq i64 %code, {signed(header_hash(header))}
  br i1 %same, label %done, label %foreign
foreign:
  %w = call i32 (ptr, i64, ptr, ...) @snprintf(ptr %text, i64 1024, ptr {
            t("the header of %s is not the one that this library was made for: it is another model's, or damaged")
        }, ptr %path)
  %gone = call i32 @munmap(ptr %data, i64 {length})
  br label %fail
done:
  %closed = call i32 @close(i32 %file)
  call void @free(ptr %path)
  ret ptr %data
fail:
  %closed.too = call i32 @close(i32 %file)
  call void @free(ptr %path)
  ret ptr null
}}

; FNV-1a of 64 bits.
define internal i64 @hash_of(ptr %bytes, i64 %count) {{
entry:
  br label %each
each:
  %k = phi i64 [ 0, %entry ], [ %k.next, %one ]
  %h = phi i64 [ {signed(0xCBF29CE484222325)}, %entry ], [ %h.next, %one ]
  %more = icmp ult i64 %k, %count
  br i1 %more, label %one, label %done
one:
  %at = getelementptr inbounds i8, ptr %bytes, i64 %k
  %byte = load i8, ptr %at
  %wide = zext i8 %byte to i64
  %mixed = xor i64 %h, %wide
  %h.next = mul i64 %mixed, {0x100000001B3}
  %k.next = add i64 %k, 1
  br label %each
done:
  ret i64 %h
}}

define internal void @unmap_weights(ptr %mapped) {{
  %none = icmp eq ptr %mapped, null
  br i1 %none, label %done, label %unmap
unmap:
  %gone = call i32 @munmap(ptr %mapped, i64 {length})
  br label %done
done:
  ret void
}}
"""
    )
