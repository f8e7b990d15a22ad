"""Options and modes: what is not known has to be refused."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ..kit.case import case
from ..kit.errors import NotApplicable, Violation, expect
from ..kit.subject import Subject

UNKNOWN = "no_backend_has_this_option"


def refused(subject: Subject, what: str, **given: Any) -> str:
    """The message of the error with which something is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(lambda x: x * 2, backend=subject.backend, **given)(torch.ones(3))
    except Exception as error:
        return str(error)
    raise Violation(f"{what} was accepted")


@case("An option that does not exist is ignored.", "A slip of the pen turns a setting off, and nobody is told.")
def unknown_option(subject: Subject) -> None:
    options: Mapping[str, Any] = {**subject.options, UNKNOWN: 1}
    told = refused(subject, "an option that does not exist", options=options)
    expect(UNKNOWN in told, f"the error does not name the option: {told[:300]}")


@case("A mode that does not exist is ignored.", "It is how users ask for speed.")
def unknown_mode(subject: Subject) -> None:
    if subject.options:
        raise NotApplicable("torch takes options or a mode, and options are given")
    told = refused(subject, "the mode 'fastest'", mode="fastest")
    expect("fastest" in told, f"the error does not name the mode: {told[:300]}")


@case("The caller's options are written to.", "One mapping is given to several calls.")
def options_are_left_alone(subject: Subject) -> None:
    options = dict(subject.options)
    compiled = torch.compile(lambda x: x * 2, backend=subject.backend, options=options or None)
    compiled(torch.ones(3))
    expect(options == dict(subject.options), f"the options became {options}")


@case("After options that were refused nothing compiles.", "A mistake in a notebook costs the session.")
def compiles_after_a_mistake(subject: Subject) -> None:
    try:
        refused(subject, "an option that does not exist", options={UNKNOWN: 1})
    except Violation:
        return  # said by another case
    x = torch.randn(3)
    expect(torch.equal(subject.compile(lambda t: t * 2)(x), x * 2), "the result is wrong")


@case("The backend's function takes no attributes.", "Torch's registry notes its tags there, and so do wrappers.")
def takes_attributes(subject: Subject) -> None:
    function: Any = torch._dynamo.lookup_backend(subject.backend)
    try:
        function.mlc_conformance = True
    except AttributeError as error:
        raise Violation(f"an attribute cannot be set on the backend's function: {error}") from None
    del function.mlc_conformance
