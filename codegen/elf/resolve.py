"""Who defines what: symbols of several objects become one set, and what they want of other libraries is known."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from .format import STB_WEAK, STT_TLS, ElfError, ElfSection, ElfSymbol, Fix, ObjectFile
from .machines import MACHINES, ElfMachine, FixKind, Wants


@dataclass(frozen=True, slots=True)
class DefinedSymbol:
    """A symbol by the object and the place in it that define it; ``index`` counts that object's symbols."""

    owner: int
    index: int


@dataclass(frozen=True, slots=True)
class ImportedSymbol:
    """A symbol that another library has, which the loader looks up by its name."""

    name: str


Target = DefinedSymbol | ImportedSymbol


@dataclass(frozen=True, slots=True)
class Use:
    """A relocation with all that is known of it."""

    owner: int
    section: int
    fix: Fix
    kind: FixKind
    target: Target


@dataclass(slots=True)
class Resolved:
    """Objects whose symbols are known.

    ``uses`` are all relocations, in order. ``slots`` and ``threads`` are what needs one place, or two, of the offset
    table, ``module`` whether the library's thread-local memory as a whole needs two, ``jumps`` the imports that code
    calls, ``pointers`` the words of data that hold addresses; each in the order in which they are met, so that equal
    objects give equal libraries.
    """

    machine: ElfMachine
    objects: tuple[ObjectFile, ...]
    exported: tuple[str, ...]
    globals: dict[str, DefinedSymbol]
    uses: list[Use] = field(default_factory=list)
    slots: list[Target] = field(default_factory=list)
    threads: list[DefinedSymbol] = field(default_factory=list)
    module: bool = False
    jumps: list[ImportedSymbol] = field(default_factory=list)
    pointers: list[Use] = field(default_factory=list)
    imports: list[ImportedSymbol] = field(default_factory=list)

    def symbol(self, d: DefinedSymbol) -> ElfSymbol:
        return self.objects[d.owner].symbols[d.index]

    def section(self, use: Use) -> ElfSection:
        return self.objects[use.owner].sections[use.section]


def resolve(objects: Sequence[ObjectFile], exported: Collection[str], imports: Collection[str]) -> Resolved:
    """Find each symbol that a relocation names.

    ``exported`` are the names that users of the library see; ``imports`` what other libraries have. Raises: ElfError
    where two objects define a name, where an exported name is missing, and for all names that nobody has, with the
    objects that use them.
    """
    machines = {o.machine for o in objects}
    if len(machines) != 1:
        raise ElfError(f"objects of {len(machines)} machines cannot be linked: " + ", ".join(o.name for o in objects))
    known = _globals(objects)
    lacking = sorted(set(exported) - known.keys())
    if lacking:
        raise ElfError(f"no object defines what the library is to export: {', '.join(lacking)}")
    found = Resolved(MACHINES[machines.pop()], tuple(objects), tuple(sorted(exported)), known)
    missing: dict[str, list[str]] = {}
    for owner, section, fix in _fixes(objects):
        given = objects[owner]
        symbol = given.symbols[fix.symbol]
        where = f"{given.name}, {given.sections[section].name}+{fix.offset:#x}, {symbol.name or 'a section'}"
        kind = found.machine.kind(fix.kind, where)
        target: Target
        if symbol.is_defined:
            # A global name means the same in every object, though another one defines it first (weak symbols).
            target = DefinedSymbol(owner, fix.symbol) if symbol.is_local else known[symbol.name]
        elif symbol.name in known:
            target = known[symbol.name]
        elif symbol.name in imports:
            target = ImportedSymbol(symbol.name)
        else:
            users = missing.setdefault(symbol.name, [])
            if given.name not in users:
                users.append(given.name)
            continue
        _note(found, Use(owner, section, fix, kind, target), where)
    if missing:
        told = "; ".join(f"{name} (used by {', '.join(users)})" for name, users in sorted(missing.items()))
        raise ElfError(f"neither the objects nor the libraries that they may use have {told}")
    return found


def _globals(objects: Sequence[ObjectFile]) -> dict[str, DefinedSymbol]:
    known: dict[str, DefinedSymbol] = {}
    for owner, given in enumerate(objects):
        for index, symbol in enumerate(given.symbols):
            if not symbol.is_defined or symbol.is_local:
                continue
            before = known.get(symbol.name)
            if before is None:
                known[symbol.name] = DefinedSymbol(owner, index)
                continue
            first = objects[before.owner]
            if first.symbols[before.index].binding == STB_WEAK:
                known[symbol.name] = DefinedSymbol(owner, index)
            elif symbol.binding != STB_WEAK:
                raise ElfError(f"both {first.name} and {given.name} define {symbol.name}")
    return known


def _fixes(objects: Sequence[ObjectFile]) -> Iterator[tuple[int, int, Fix]]:
    for owner, given in enumerate(objects):
        for k, section in enumerate(given.sections):
            for fix in section.fixes:
                yield owner, k, fix


def _note(found: Resolved, use: Use, where: str) -> None:
    """Write down what a use needs made. Raises: ElfError for what no library can have."""
    found.uses.append(use)
    wants, target = use.kind.wants, use.target
    is_import = isinstance(target, ImportedSymbol)
    if isinstance(target, ImportedSymbol):
        _once(found.imports, target)
        if wants is Wants.SYMBOL:
            raise ElfError(
                f"{where}: {use.kind.name} takes the address of {target.name} as if this library had it; another has"
            )
    is_thread_local = isinstance(target, DefinedSymbol) and found.symbol(target).kind == STT_TLS
    of_threads = wants in (Wants.THREAD, Wants.MODULE, Wants.THREAD_OFFSET)
    if of_threads != is_thread_local and wants is not Wants.NOTHING:
        told = "of memory of the process" if of_threads else "of thread-local memory"
        raise ElfError(f"{where}: {use.kind.name} {told}, or thread-local memory of another library")
    if wants is Wants.SLOT or (wants is Wants.CALL and is_import):
        _once(found.slots, target)
    if wants is Wants.CALL and isinstance(target, ImportedSymbol):
        _once(found.jumps, target)
    if wants is Wants.THREAD and isinstance(target, DefinedSymbol):
        _once(found.threads, target)
    found.module |= wants is Wants.MODULE
    if wants is Wants.POINTER:
        section = found.section(use)
        if not section.is_writable or section.is_thread_local:
            raise ElfError(f"{where}: {use.kind.name} in {section.name}, which the loader cannot write to")
        found.pointers.append(use)


def _once(items: list, item: object) -> None:  # type: ignore[type-arg]
    if item not in items:
        items.append(item)
