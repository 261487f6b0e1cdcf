"""Markup: HTML that is safe to write, and how text becomes it.

Text of a run is not to be trusted. It reaches a page through `element` alone, which escapes it and makes visible what
would act unseen: control and format characters, marks of writing direction, bytes that are no UTF-8.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable

# control, format (direction marks, zero-width), surrogate, private and unassigned characters, line and paragraph ends
UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
VOID = frozenset({"meta", "input", "br"})
NEWLINE = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"


class Markup(str):
    """HTML that stays as it is."""


Child = str | int | float | None


def name_of(character: str) -> str | None:
    """How a character that would not be seen is written out; None for the others."""
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        # a byte that is no UTF-8, as read with `surrogateescape`
        return f"\\x{code - 0xDC00:02X}"
    if code < 0x20 or (code > 0x7E and unicodedata.category(character) in UNSEEN) or code == 0x7F:
        return f"U+{code:04X}"
    return None


def visible(text: str) -> Markup:
    """`text` as HTML; what would not be seen stands in a box, a line end also ends the line."""
    if text.isascii() and text.isprintable():
        return Markup(html.escape(text))
    out = []
    for character in text:
        if character == "\n":
            out.append(f'<span class="unseen">{NEWLINE}</span>\n')
        elif (name := name_of(character)) is not None:
            out.append(f'<span class="unseen">{name}</span>')
        else:
            out.append(html.escape(character))
    return Markup("".join(out))


def plain(text: str) -> str:
    """`text` for an attribute: the same, without the boxes, escaped."""
    return html.escape("".join(NEWLINE if c == "\n" else name_of(c) or c for c in text))


def element(name: str, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """<name attributes>children</name>. Children are escaped unless they are Markup; None is left out.

    An attribute is named with `_` for `-`, and one `_` behind a Python keyword; True writes the name alone, None and
    False leave it out.
    """
    written = [name]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            written.append(key)
        elif value is not None and value is not False:
            written.append(f'{key}="{plain(str(value))}"')
    opening = f"<{' '.join(written)}>"
    return Markup(opening) if name in VOID else Markup(f"{opening}{joined(children)}</{name}>")


def joined(children: Iterable[Child]) -> Markup:
    """Children one behind the other."""
    return Markup("".join(c if isinstance(c, Markup) else visible(str(c)) for c in children if c is not None))


def number(value: float | int | None, *, sign: bool = False) -> str:
    """Four significant digits, whole numbers in full; "-" for None."""
    if value is None:
        return "-"
    size = abs(value)
    if isinstance(value, int) or size >= 1e4 or float(value).is_integer():
        kind = ",.0f" if size < 1e15 else ".4g"
    else:
        kind = ",.4g"
    text = format(value, f"+{kind}" if sign and value else kind)
    return f"\N{MINUS SIGN}{text[1:]}" if text.startswith("-") else text


def table(head: Iterable[Child], rows: Iterable[Iterable[Child]], caption: str, class_: str | None = None) -> Markup:
    """A table whose first column names its rows."""
    top = element("tr", *(element("th", h, scope="col") for h in head))
    body = []
    for first, *rest in rows:
        body.append(element("tr", element("th", first, scope="row"), *(element("td", c) for c in rest)))
    inner = element("table", element("caption", caption), element("thead", top), element("tbody", *body), class_=class_)
    return element("div", inner, class_="wide", tabindex=0, role="region", aria_label=caption)


def figures(rows: Iterable[Iterable[Child]], label: str) -> Markup:
    """Names and values side by side, in as many columns as there is room for."""
    pairs = [element("div", element("dt", name), element("dd", value)) for name, value in rows]
    return element("dl", *pairs, class_="figures", aria_label=label)
