"""An SVG drawing of losses over updates."""

from collections.abc import Iterable

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 50, 20, 44, 40
LEGEND_WIDTH, LINE_HEIGHT = 120, 17
MIDDLE = 'text-anchor="middle"'
Losses = list[tuple[int, float]]  # update, loss


class LossPlot:
    """`parts` are the elements of the drawing.

    update_ticks: its numbers below the plot, of which the last one is at the right edge.
    axis: what they are.
    values: losses that the plot has room for.
    """

    def __init__(self, caption: str, axis: str, update_ticks: Iterable[int], values: list[float]):
        ticks = list(update_ticks)
        self.updates = ticks[-1]
        self.low, self.high = int(min(values)), int(max(values)) + 1
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'role="img" font-family="sans-serif" font-size="12" fill="#333">',
            f"<title>{caption}</title>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            label(caption, LEFT, 20, 'font-size="14"'),
        ]
        for loss in range(self.low, self.high + 1):
            self.parts.append(
                f'<path d="M{LEFT} {self.y(loss)}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>'
                + label(str(loss), LEFT - 8, self.y(loss) + 4, 'text-anchor="end"')
            )
        for update in ticks:
            self.parts.append(label(str(update), self.x(update), HEIGHT - BOTTOM + 16, MIDDLE))
        self.parts.append(label(axis, WIDTH / 2, HEIGHT - 6, MIDDLE))

    def x(self, update: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * update / self.updates, 1)

    def y(self, loss: float) -> float:
        share = (self.high - loss) / (self.high - self.low)
        return round(TOP + (HEIGHT - TOP - BOTTOM) * share, 1)

    def curve(self, losses: Losses, style: str) -> None:
        points = " ".join(f"{self.x(update)},{self.y(loss)}" for update, loss in losses)
        self.parts.append(f'<polyline points="{points}" fill="none" {style}/>')

    def dots(self, losses: Losses, color: str) -> None:
        for update, loss in losses:
            self.parts.append(
                f'<circle cx="{self.x(update)}" cy="{self.y(loss)}" r="4" fill="{color}"/>'
            )

    def mark(self, update: int, words: str, color: str) -> None:
        """A dashed line at an update."""
        self.parts.append(
            f'<path d="M{self.x(update)} {TOP}V{HEIGHT - BOTTOM}" stroke="{color}" '
            'stroke-dasharray="4 3"/>'
            + label(words, self.x(update) + 5, TOP + 12, f'fill="{color}"')
        )

    def legend(self, entries: Iterable[tuple[str, str]]) -> None:
        """entries: words and colours."""
        start = WIDTH - RIGHT - LEGEND_WIDTH
        for number, (words, color) in enumerate(entries):
            height = TOP + 34 + LINE_HEIGHT * number
            self.parts.append(
                f'<path d="M{start} {height - 4}h22" stroke="{color}" stroke-width="4"/>'
                + label(words, start + 30, height)
            )

    def text(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def label(words: str, at: float, height: float, style: str = "") -> str:
    return f'<text x="{at}" y="{height}" {style}>{words}</text>'
