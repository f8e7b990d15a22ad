"""The threads of a library, in LLVM IR: a team for each opened model, and OpenMP's three functions over it.

A *round* is one parallel loop: the thread that called runs its share as number zero, workers the others. Workers are
made when the first round needs them. Between rounds they look at the number of the round for a while, then sleep on it
(a futex). A team that is busy with another context's round, or with the round around this one, is not waited for: the
loop runs on its caller alone, which gives the same result.

After a fork the workers are not there. The team remembers the process that made them, and makes others.
"""

from __future__ import annotations

from .platform import Platform

# How often a waiting thread looks before it sleeps: some ten microseconds.
_LOOKS = 1000
# Bytes of a worker's stack. Kernels keep up to 64 KiB there, and musl's threads have 128 KiB in all by themselves.
_STACK = 1 << 20
# Threads are counted in a mask of so many bytes.
_MASK = 1024

# The round and what is left of it are each written by one side and watched by the other: each has a line of its own.
TEAM_TYPE = """
; threads; process that made the workers; whether in a round; workers made; whether the end has come; threads of this
; round; its function and data; the workers' seats; the host's function for rounds, and its data; then on lines of their
; own the number of the round with the count of sleepers, and what is left of it with whether the caller sleeps
%Team = type { i32, i32, i32, i32, i32, i32, ptr, ptr, ptr, ptr, ptr, [64 x i8], i32, i32, [64 x i8], i32, i32 }
; team, number of the worker, the round before its first, its thread
%Seat = type { ptr, i32, i32, i64 }
; what each thread knows: the team whose rounds it may begin, its number in a round, and the threads of that
%Own = type { ptr, i32, i32 }
"""

DECLARATIONS = """
declare i32 @getpid()
declare i64 @syscall(i64, ...)
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_join(i64, ptr)
declare i32 @pthread_attr_init(ptr)
declare i32 @pthread_attr_setstacksize(ptr, i64)
declare i32 @pthread_attr_destroy(ptr)
declare i32 @pthread_sigmask(i32, ptr, ptr)
"""


def team_text(p: Platform) -> str:
    """Functions over ``%Team``: ``@team_init``, ``@team_end``, and what kernels call."""
    return f"""
@own = internal thread_local global %Own {{ ptr null, i32 0, i32 1 }}
declare void {p.pause.split("(")[0]}({p.pause_type})

; --- what kernels call ------------------------------------------------------------------------------------------------

define hidden i32 @omp_get_thread_num() {{
  %own = call ptr @llvm.threadlocal.address.p0(ptr @own)
  %at = getelementptr inbounds %Own, ptr %own, i32 0, i32 1
  %number = load i32, ptr %at
  ret i32 %number
}}

define hidden i32 @omp_get_num_threads() {{
  %own = call ptr @llvm.threadlocal.address.p0(ptr @own)
  %at = getelementptr inbounds %Own, ptr %own, i32 0, i32 2
  %size = load i32, ptr %at
  ret i32 %size
}}

; Run "run(data)" on a team; "wanted" threads at most, where it is not zero.
define hidden void @GOMP_parallel(ptr %run, ptr %data, i32 %wanted, i32 %flags) {{
  %own = call ptr @llvm.threadlocal.address.p0(ptr @own)
  %team = load ptr, ptr %own
  %none = icmp eq ptr %team, null
  br i1 %none, label %alone, label %count
count:
  %threads = load i32, ptr %team
  %any = icmp eq i32 %wanted, 0
  %fewer = call i32 @llvm.umin.i32(i32 %threads, i32 %wanted)
  %size = select i1 %any, i32 %threads, i32 %fewer
  %one = icmp ule i32 %size, 1
  br i1 %one, label %alone, label %whose
whose:
  %host.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 9
  %host = load ptr, ptr %host.at
  %ours = icmp eq ptr %host, null
  br i1 %ours, label %claim, label %hosts
hosts:
  call void @host_round(ptr %team, ptr %host, ptr %run, ptr %data, i32 %size)
  ret void
claim:
  %claimed = call i1 @claim(ptr %team)
  br i1 %claimed, label %together, label %alone
together:
  call void @round(ptr %team, ptr %run, ptr %data, i32 %size)
  %busy.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 2
  store atomic i32 0, ptr %busy.at release, align 4
  ret void
alone:
  call void @member(ptr %run, ptr %data, i32 0, i32 1)
  ret void
}}

; Run one thread's share: meanwhile it is number "number" of "size" and begins no rounds.
define internal void @member(ptr %run, ptr %data, i32 %number, i32 %size) {{
  %own = call ptr @llvm.threadlocal.address.p0(ptr @own)
  %before = load %Own, ptr %own
  %named = insertvalue %Own {{ ptr null, i32 0, i32 0 }}, i32 %number, 1
  %during = insertvalue %Own %named, i32 %size, 2
  store %Own %during, ptr %own
  call void %run(ptr %data)
  store %Own %before, ptr %own
  ret void
}}

; --- rounds -----------------------------------------------------------------------------------------------------------

; Take the team for a round; false where it is in one. In the child of a fork the first thread begins anew.
define internal i1 @claim(ptr %team) {{
  %pid = call i32 @getpid()
  %owner.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 1
  %busy.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 2
  %owner = load atomic i32, ptr %owner.at acquire, align 4
  %same = icmp eq i32 %owner, %pid
  br i1 %same, label %take, label %forked
forked:
  %renewing = icmp eq i32 %owner, -1
  br i1 %renewing, label %no, label %renew
renew:
  %swap = cmpxchg ptr %owner.at, i32 %owner, i32 -1 seq_cst seq_cst
  %first = extractvalue {{ i32, i1 }} %swap, 1
  br i1 %first, label %anew, label %no
anew:
  %made.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 3
  store i32 0, ptr %made.at
  %asleep.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 13
  store i32 0, ptr %asleep.at
  %waits.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 16
  store i32 0, ptr %waits.at
  store i32 0, ptr %busy.at
  store atomic i32 %pid, ptr %owner.at release, align 4
  br label %take
take:
  %try = cmpxchg ptr %busy.at, i32 0, i32 1 acquire monotonic
  %taken = extractvalue {{ i32, i1 }} %try, 1
  ret i1 %taken
no:
  ret i1 false
}}

; One round of a team that is taken; "size" threads at most.
define internal void @round(ptr %team, ptr %run, ptr %data, i32 %wanted) {{
  %made = call i32 @hire(ptr %team)
  %all = add i32 %made, 1
  %size = call i32 @llvm.umin.i32(i32 %wanted, i32 %all)
  %size.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 5
  store i32 %size, ptr %size.at
  %run.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 6
  store ptr %run, ptr %run.at
  %data.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 7
  store ptr %data, ptr %data.at
  %left.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 15
  store atomic i32 %made, ptr %left.at monotonic, align 4
  call void @next_round(ptr %team)
  call void @member(ptr %run, ptr %data, i32 0, i32 %size)
  call void @wait_for_all(ptr %team)
  ret void
}}

; Tell the workers that there is something to do, and wake those that sleep.
define internal void @next_round(ptr %team) {{
  %round.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 12
  %old = atomicrmw add ptr %round.at, i32 1 seq_cst
  %asleep.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 13
  %asleep = load atomic i32, ptr %asleep.at seq_cst, align 4
  %some = icmp ne i32 %asleep, 0
  br i1 %some, label %wake, label %done
wake:
  call void @wake(ptr %round.at, i64 2147483647)
  br label %done
done:
  ret void
}}

; Until no worker is in the round: look for a while, then sleep.
define internal void @wait_for_all(ptr %team) {{
entry:
  %left.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 15
  %waits.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 16
  br label %look
look:
  %k = phi i64 [ 0, %entry ], [ %k.next, %pause ]
  %left = load atomic i32, ptr %left.at acquire, align 4
  %none = icmp eq i32 %left, 0
  br i1 %none, label %done, label %pause
pause:
  call void {p.pause}
  %k.next = add i64 %k, 1
  %again = icmp ult i64 %k.next, {_LOOKS}
  br i1 %again, label %look, label %sleepy
sleepy:
  store atomic i32 1, ptr %waits.at seq_cst, align 4
  br label %sleep
sleep:
  %still = load atomic i32, ptr %left.at seq_cst, align 4
  %gone = icmp eq i32 %still, 0
  br i1 %gone, label %awake, label %down
down:
  call void @sleep_on(ptr %left.at, i32 %still)
  br label %sleep
awake:
  store atomic i32 0, ptr %waits.at monotonic, align 4
  br label %done
done:
  ret void
}}

; --- workers ----------------------------------------------------------------------------------------------------------

; How many workers there are; those that are lacking are made. Where the system gives no more threads, there are fewer.
define internal i32 @hire(ptr %team) {{
entry:
  %attributes = alloca [128 x i8], align 16
  %signals = alloca [128 x i8], align 16
  %before = alloca [128 x i8], align 16
  %threads = load i32, ptr %team
  %most = sub i32 %threads, 1
  %made.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 3
  %made = load i32, ptr %made.at
  %full = icmp uge i32 %made, %most
  br i1 %full, label %enough, label %begin
enough:
  ret i32 %made
begin:
  ; Signals are the host's threads' to handle.
  call void @llvm.memset.p0.i64(ptr %signals, i8 -1, i64 128, i1 false)
  %b = call i32 @pthread_sigmask(i32 0, ptr %signals, ptr %before)
  %i = call i32 @pthread_attr_init(ptr %attributes)
  %s = call i32 @pthread_attr_setstacksize(ptr %attributes, i64 {_STACK})
  %seats.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 8
  %seats = load ptr, ptr %seats.at
  %round.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 12
  %round = load atomic i32, ptr %round.at monotonic, align 4
  br label %each
each:
  %k = phi i32 [ %made, %begin ], [ %k.next, %good ]
  %seat = getelementptr inbounds %Seat, ptr %seats, i32 %k
  store ptr %team, ptr %seat
  %number.at = getelementptr inbounds %Seat, ptr %seat, i32 0, i32 1
  %number = add i32 %k, 1
  store i32 %number, ptr %number.at
  %seen.at = getelementptr inbounds %Seat, ptr %seat, i32 0, i32 2
  store i32 %round, ptr %seen.at
  %thread.at = getelementptr inbounds %Seat, ptr %seat, i32 0, i32 3
  %status = call i32 @pthread_create(ptr %thread.at, ptr %attributes, ptr @work, ptr %seat)
  %fine = icmp eq i32 %status, 0
  br i1 %fine, label %good, label %end
good:
  %k.next = add i32 %k, 1
  %more = icmp ult i32 %k.next, %most
  br i1 %more, label %each, label %end
end:
  %now = phi i32 [ %k, %each ], [ %k.next, %good ]
  store i32 %now, ptr %made.at
  %d = call i32 @pthread_attr_destroy(ptr %attributes)
  %r = call i32 @pthread_sigmask(i32 2, ptr %before, ptr null)
  ret i32 %now
}}

; The life of a worker: wait for a round, run its share, say so.
define internal ptr @work(ptr %seat) {{
entry:
  %team = load ptr, ptr %seat
  %number.at = getelementptr inbounds %Seat, ptr %seat, i32 0, i32 1
  %number = load i32, ptr %number.at
  %first.at = getelementptr inbounds %Seat, ptr %seat, i32 0, i32 2
  %first = load i32, ptr %first.at
  %end.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 4
  %size.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 5
  %run.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 6
  %data.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 7
  br label %next
next:
  %seen = phi i32 [ %first, %entry ], [ %now, %told ]
  %now = call i32 @wait_for_round(ptr %team, i32 %seen)
  %end = load atomic i32, ptr %end.at monotonic, align 4
  %over = icmp ne i32 %end, 0
  br i1 %over, label %leave, label %join
join:
  %size = load i32, ptr %size.at
  %mine = icmp ult i32 %number, %size
  br i1 %mine, label %run, label %told
run:
  %function = load ptr, ptr %run.at
  %data = load ptr, ptr %data.at
  call void @member(ptr %function, ptr %data, i32 %number, i32 %size)
  br label %told
told:
  call void @leave_round(ptr %team)
  br label %next
leave:
  ret ptr null
}}

; The number of the round after "seen", when it has begun.
define internal i32 @wait_for_round(ptr %team, i32 %seen) {{
entry:
  %round.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 12
  %asleep.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 13
  br label %look
look:
  %k = phi i64 [ 0, %entry ], [ %k.next, %pause ]
  %now = load atomic i32, ptr %round.at acquire, align 4
  %new = icmp ne i32 %now, %seen
  br i1 %new, label %found, label %pause
found:
  ret i32 %now
pause:
  call void {p.pause}
  %k.next = add i64 %k, 1
  %again = icmp ult i64 %k.next, {_LOOKS}
  br i1 %again, label %look, label %sleep
sleep:
  %a = atomicrmw add ptr %asleep.at, i32 1 seq_cst
  call void @sleep_on(ptr %round.at, i32 %seen)
  %b = atomicrmw sub ptr %asleep.at, i32 1 seq_cst
  %then = load atomic i32, ptr %round.at acquire, align 4
  %changed = icmp ne i32 %then, %seen
  br i1 %changed, label %woken, label %sleep
woken:
  ret i32 %then
}}

; One worker less in the round; the last one wakes the caller, if that sleeps.
define internal void @leave_round(ptr %team) {{
  %left.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 15
  %waits.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 16
  %left = atomicrmw sub ptr %left.at, i32 1 seq_cst
  %last = icmp eq i32 %left, 1
  br i1 %last, label %tell, label %done
tell:
  %waits = load atomic i32, ptr %waits.at seq_cst, align 4
  %sleeps = icmp ne i32 %waits, 0
  br i1 %sleeps, label %wake, label %done
wake:
  call void @wake(ptr %left.at, i64 1)
  br label %done
done:
  ret void
}}

; Sleep while the word is "value". It may return early.
define internal void @sleep_on(ptr %word, i32 %value) {{
  %wide = zext i32 %value to i64
  %s = call i64 (i64, ...) @syscall(i64 {p.futex}, ptr %word, i64 128, i64 %wide, ptr null)
  ret void
}}

; Wake so many threads that sleep on the word.
define internal void @wake(ptr %word, i64 %count) {{
  %s = call i64 (i64, ...) @syscall(i64 {p.futex}, ptr %word, i64 129, i64 %count)
  ret void
}}

; --- rounds that the host runs ----------------------------------------------------------------------------------------

; "host" is void (*)(void *data, int count, void (*member)(void *task, int number), void *task).
define internal void @host_round(ptr %team, ptr %host, ptr %run, ptr %data, i32 %size) {{
  %task = alloca {{ ptr, ptr, i32 }}
  store ptr %run, ptr %task
  %data.at = getelementptr inbounds {{ ptr, ptr, i32 }}, ptr %task, i32 0, i32 1
  store ptr %data, ptr %data.at
  %size.at = getelementptr inbounds {{ ptr, ptr, i32 }}, ptr %task, i32 0, i32 2
  store i32 %size, ptr %size.at
  %passed.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 10
  %passed = load ptr, ptr %passed.at
  call void %host(ptr %passed, i32 %size, ptr @host_member, ptr %task)
  ret void
}}

define internal void @host_member(ptr %task, i32 %number) {{
  %run = load ptr, ptr %task
  %data.at = getelementptr inbounds {{ ptr, ptr, i32 }}, ptr %task, i32 0, i32 1
  %data = load ptr, ptr %data.at
  %size.at = getelementptr inbounds {{ ptr, ptr, i32 }}, ptr %task, i32 0, i32 2
  %size = load i32, ptr %size.at
  call void @member(ptr %run, ptr %data, i32 %number, i32 %size)
  ret void
}}

; --- begin and end ----------------------------------------------------------------------------------------------------

; A team of "asked" threads, or as many as the process may use processors; memory is zero. False where there is no
; memory for its seats.
define internal i1 @team_init(ptr %team, i32 %asked, ptr %host, ptr %passed) {{
entry:
  %some = icmp sgt i32 %asked, 0
  br i1 %some, label %known, label %count
count:
  %processors = call i32 @processors()
  br label %known
known:
  %threads = phi i32 [ %asked, %entry ], [ %processors, %count ]
  store i32 %threads, ptr %team
  %owner.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 1
  %pid = call i32 @getpid()
  store i32 %pid, ptr %owner.at
  %host.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 9
  store ptr %host, ptr %host.at
  %passed.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 10
  store ptr %passed, ptr %passed.at
  %wide = zext i32 %threads to i64
  %seats = call ptr @calloc(i64 %wide, i64 24)
  %seats.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 8
  store ptr %seats, ptr %seats.at
  %fine = icmp ne ptr %seats, null
  ret i1 %fine
}}

; How many processors this process may run on.
define internal i32 @processors() {{
entry:
  %mask = alloca [{_MASK // 8} x i64], align 8
  call void @llvm.memset.p0.i64(ptr %mask, i8 0, i64 {_MASK}, i1 false)
  %s = call i64 (i64, ...) @syscall(i64 {p.getaffinity}, i64 0, i64 {_MASK}, ptr %mask)
  br label %word
word:
  %k = phi i64 [ 0, %entry ], [ %k.next, %word ]
  %sum = phi i64 [ 0, %entry ], [ %sum.next, %word ]
  %at = getelementptr inbounds i64, ptr %mask, i64 %k
  %bits = load i64, ptr %at
  %ones = call i64 @llvm.ctpop.i64(i64 %bits)
  %sum.next = add i64 %sum, %ones
  %k.next = add i64 %k, 1
  %more = icmp ult i64 %k.next, {_MASK // 8}
  br i1 %more, label %word, label %done
done:
  %count = trunc i64 %sum.next to i32
  %least = call i32 @llvm.umax.i32(i32 %count, i32 1)
  ret i32 %least
}}

; Send the workers home and wait until they are gone; in the child of a fork there are none.
define internal void @team_end(ptr %team) {{
entry:
  %seats.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 8
  %seats = load ptr, ptr %seats.at
  %pid = call i32 @getpid()
  %owner.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 1
  %owner = load i32, ptr %owner.at
  %same = icmp eq i32 %owner, %pid
  br i1 %same, label %count, label %done
count:
  %made.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 3
  %made = load i32, ptr %made.at
  %none = icmp eq i32 %made, 0
  br i1 %none, label %done, label %stop
stop:
  %end.at = getelementptr inbounds %Team, ptr %team, i32 0, i32 4
  store atomic i32 1, ptr %end.at monotonic, align 4
  call void @next_round(ptr %team)
  br label %each
each:
  %k = phi i32 [ 0, %stop ], [ %k.next, %each ]
  %thread.at = getelementptr inbounds %Seat, ptr %seats, i32 %k, i32 3
  %thread = load i64, ptr %thread.at
  %j = call i32 @pthread_join(i64 %thread, ptr null)
  %k.next = add i32 %k, 1
  %more = icmp ult i32 %k.next, %made
  br i1 %more, label %each, label %done
done:
  call void @free(ptr %seats)
  ret void
}}
"""
