"""The JSON body of a request, read field by field.

In: bytes. Out: values of the right types, or an `ApiError` that names the field; and the names of fields that are not
honoured, for the record of who asks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from rlinf.agents.endpoint.errors import ApiError, invalid

LARGEST = 2**31 - 1
"""Whole numbers of a request are at most this."""
_PLACE = re.compile(r"\[\d+\]")
_KINDS = {str: "a string", bool: "true or false", list: "an array", dict: "an object"}


def parsed(raw: bytes) -> Fields:
    """A request's body.

    Raises:
        ApiError: it is no JSON object, or holds what JSON in UTF-8 cannot.
    """
    try:
        body = json.loads(raw, parse_constant=_no_constant)
        if b"\\u" in raw:
            json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    return Fields(body)


def _no_constant(name: str) -> Any:
    raise ValueError(f"there is no {name} in JSON")


class Fields:
    """A JSON object; null counts as left out.

    Args:
        given: it.
        path: where it stands in the request.
        unheeded: where to note what is not honoured; None begins a list.
    """

    def __init__(self, given: Mapping[str, Any], path: str = "", unheeded: dict[str, None] | None = None) -> None:
        self.given, self._path = given, path
        self._known: set[str] = set()
        self.unheeded: dict[str, None] = {} if unheeded is None else unheeded
        """Names of fields that are not honoured, in order; those of a list without their places in it."""

    def path(self, name: str) -> str:
        """A field as errors call it."""
        return f"{self._path}.{name}" if self._path else name

    def any(self, name: str) -> Any:
        """A value of any type; None: left out."""
        self._known.add(name)
        return self.given.get(name)

    def _of(self, kind: type, name: str, default: Any) -> Any:
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise invalid(self.path(name), f"{self.path(name)} must be {_KINDS[kind]}")
        return value

    def text(self, name: str, default: str | None = None) -> Any:
        """A text."""
        return self._of(str, name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        return bool(self._of(bool, name, default))

    def array(self, name: str) -> list[Any]:
        """A list, empty where it is left out."""
        return list(self._of(list, name, []))

    def object(self, name: str) -> Fields | None:
        """An object; None: left out."""
        value = self._of(dict, name, None)
        return None if value is None else Fields(value, self.path(name), self.unheeded)

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        return fields_of(self.array(name), self.path(name), self.unheeded)

    def wanted(self, name: str, value: Any) -> Any:
        """A value that must be there.

        Raises:
            ApiError: it is not.
        """
        if value is None:
            raise ApiError(
                400, f"{self.path(name)} is missing", code="missing_required_parameter", param=self.path(name)
            )
        return value

    def whole(self, name: str, low: int, high: int = LARGEST) -> int | None:
        """A whole number; None: left out."""
        value = self.any(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise invalid(self.path(name), f"{self.path(name)} must be a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number; None: left out."""
        value = self.any(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise invalid(self.path(name), f"{self.path(name)} must be a number from {low:g} to {high:g}")
        return float(value) if math.isfinite(value) else None

    def texts(self, name: str) -> tuple[str, ...]:
        """A text or several, none of them empty."""
        value = self.any(name)
        listed = [value] if isinstance(value, str) else value or []
        if not isinstance(listed, list) or not all(isinstance(each, str) and each for each in listed):
            raise invalid(self.path(name), f"{self.path(name)} must be a text or an array of texts, none of them empty")
        return tuple(listed)

    def ignored(self, *names: str) -> None:
        """Fields that say nothing about the answer."""
        self._known.update(names)

    def note(self, name: str, value: Any = None) -> None:
        """Note that a field is not honoured.

        Args:
            name: the field.
            value: that is not, where others are.
        """
        self._known.add(name)
        path = _PLACE.sub("", self.path(name))
        self.unheeded[path if value is None else f"{path}={value!s:.40}"] = None

    def wish(self, *names: str) -> None:
        """Fields that are wishes of which none is granted: they are noted where they say something."""
        for name in names:
            if self.any(name) not in (None, False, [], {}, ""):
                self.note(name)

    def neutral(self, name: str, *values: Any, why: str) -> None:
        """A field that is supported only where it changes nothing.

        Args:
            name: the field.
            values: that change nothing, besides null.
            why: it is not supported.
        """
        value = self.any(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in values):
            raise ApiError(
                400, f"{self.path(name)} is not supported: {why}", code="unsupported_parameter", param=self.path(name)
            )

    def done(self) -> None:
        """Note all that nobody has asked for."""
        for name, value in self.given.items():
            if name not in self._known and value is not None:
                self.note(name)


def fields_of(items: list[Any], path: str, unheeded: dict[str, None] | None = None) -> list[Fields]:
    """Objects of a list.

    Args:
        items: it.
        path: where it stands in the request.
        unheeded: where to note what is not honoured.

    Raises:
        ApiError: one of them is none.
    """
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise invalid(f"{path}[{number}]", f"{path}[{number}] must be an object")
    return [Fields(item, f"{path}[{number}]", unheeded) for number, item in enumerate(items)]


def words(content: Any, path: str, kinds: Collection[str] = ("text",)) -> str:
    """What a message says: a text, or a list of parts that are texts.

    Raises:
        ApiError: a part is something else, such as a picture.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(path, f"{path} must be a string or an array of parts")
    said = []
    for part in fields_of(content, path):
        kind = part.text("type")
        if kind not in kinds:
            raise invalid(
                part.path("type"), f"{part.path('type')}: {kind!r} is not supported; there is {', '.join(kinds)}"
            )
        text = part.text("refusal" if kind == "refusal" else "text")
        said.append(part.wanted("text", text))
    return "".join(said)
