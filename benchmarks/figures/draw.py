"""Pictures as SVG that can be read on a light and on a dark page: text, boxes, lines, and a few colours with names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# (light, dark). White text can be read on the first seven in both.
COLOURS: dict[str, tuple[str, str]] = {
    "blue": ("#3b6fb6", "#4a7fc4"),
    "orange": ("#c4622d", "#c96a36"),
    "green": ("#2f7f5f", "#388c6b"),
    "purple": ("#7a4fa3", "#8a61b3"),
    "red": ("#b3383f", "#bd4a50"),
    "teal": ("#2b7a8c", "#378799"),
    "grey": ("#6e7781", "#768390"),
    "pale": ("#d8dee4", "#444c56"),
    "text": ("#1f2328", "#e6edf3"),
    "quiet": ("#59636e", "#adbac7"),
    "page": ("#ffffff", "#1c2128"),
}


class Picture:
    """A picture of `width` by `height`, with a title that screen readers speak."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, hint: str = "", round_: int = 2
    ) -> None:
        shape = f'<rect class="{colour}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}"'
        self._parts.append(f'{shape} rx="{round_}"' + (f"><title>{escape(hint)}</title></rect>" if hint else "/>"))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = "text",
        *,
        at: str = "start",
        size: int = 13,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text class="{colour}" x="{x:.1f}" y="{y:.1f}" text-anchor="{at}" font-size="{size}"{weight}>'
            f"{escape(text)}</text>"
        )

    def on(self, x: float, y: float, text: str, size: int = 12) -> None:
        """White text in the middle of a coloured box."""
        self._parts.append(
            f'<text fill="#ffffff" x="{x:.1f}" y="{y:.1f}" text-anchor="middle" font-size="{size}">'
            f"{escape(text)}</text>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = "quiet", *, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<line class="line-{colour}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{dash}/>'
        )

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]], size: int = 12) -> None:
        """(colour, words) one after the other in a line."""
        for colour, words in entries:
            self.box(x, y - 10, 12, 12, colour)
            self.text(x + 17, y, words, "quiet", size=size)
            x += 17 + 0.56 * size * len(words) + 18

    def svg(self) -> str:
        used = [name for name in COLOURS if any(f'"{name}"' in p or f'"line-{name}"' in p for p in self._parts)]
        names = [*used, *(["page"] if "page" not in used else [])]
        light = _style(names, 0)
        dark = _style(names, 1)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
                f'width="{self.width}" font-family="system-ui, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>",
                f'<rect class="page" width="{self.width}" height="{self.height}" rx="6"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def _style(names: Sequence[str], which: int) -> str:
    return " ".join(
        f".{name} {{ fill: {COLOURS[name][which]} }} .line-{name} {{ stroke: {COLOURS[name][which]} }}"
        for name in names
    )


def bars(
    title: str,
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    colours: dict[str, str],
    *,
    unit: str,
    left: int = 190,
    width: int = 760,
    note: str = "",
    total: bool = True,
) -> Picture:
    """Horizontal bars, each of parts (kind, amount); `colours` by kind, in the order of the legend."""
    lines = -(-len(colours) // 4)
    picture = Picture(width, 64 + 20 * lines + 30 * len(rows) + (22 if note else 0), title)
    picture.text(16, 26, title, bold=True, size=15)
    kinds = list(colours.items())
    for number in range(lines):
        picture.legend(16, 50 + 20 * number, [(c, k) for k, c in kinds[4 * number : 4 * number + 4]])
    most = max(sum(amount for _, amount in parts) for _, parts in rows)
    scale = (width - left - 80) / most
    y = 44 + 20 * lines
    for label, parts in rows:
        picture.text(left - 10, y + 18, label, at="end")
        x = float(left)
        for kind, amount in parts:
            if amount:
                picture.box(x, y + 4, scale * amount, 20, colours[kind], f"{label}: {kind} {amount:.3g} {unit}")
                x += scale * amount
        if total:
            picture.text(x + 6, y + 18, f"{sum(amount for _, amount in parts):.3g} {unit}", "quiet", size=12)
        y += 30
    if note:
        picture.text(16, y + 18, note, "quiet", size=12)
    return picture
