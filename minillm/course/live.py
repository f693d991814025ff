"""What every live view has: a name that one widget holds, a picture, a verdict, and a still picture for readers on the web."""

from __future__ import annotations

import base64
from typing import Any, Sequence

import ipywidgets as w

from minillm.course.session import headless

_open: dict[str, w.Widget] = {}  # name → the one live widget of that name in this kernel


def close_tree(widget: w.Widget) -> None:
    """Close a widget with everything that it holds: children, layouts, styles."""
    for child in getattr(widget, "children", ()):
        close_tree(child)
    for name in ("layout", "style"):
        held = getattr(widget, name, None)
        if isinstance(held, w.Widget):
            held.close()
    w.Widget.close(widget)


def claim(name: str, widget: w.Widget) -> Any:
    """Make ``widget`` the only live one of this name: running a cell again closes the widget of its last run."""
    old = _open.pop(name, None)
    if old is not None:
        close_widget(old)
    _open[name] = widget
    return widget


def close_widget(widget: w.Widget) -> None:
    """Close a live view, or any widget with everything that it holds."""
    if isinstance(widget, LiveView):
        widget.close()
    else:
        close_tree(widget)


class LiveView(w.VBox):
    """Controls above a verdict and a picture. A cell that builds a view of the same name again replaces this one."""

    _closed = True  # until it is built: a view whose arguments were refused has nothing to close

    def __init__(self, name: str, controls: Sequence[w.Widget]) -> None:
        self.name, self._headless, self._closed = name, headless(), False
        self.picture = w.Image(format="png", layout=w.Layout(width="min(100%, 770px)"))
        self.verdict = w.HTML()
        super().__init__([w.HBox(list(controls), layout=w.Layout(flex_flow="row wrap")), self.verdict, self.picture])
        claim(name, self)

    def close(self) -> None:
        """Close every widget of the view. ipywidgets calls this again when the object is collected."""
        self._closed = True
        if _open.get(self.name) is self:
            del _open[self.name]
        close_tree(self)

    def settle(self) -> None:
        """Called before the view is shown or saved: what must be there by then."""

    def __repr__(self) -> str:
        return f"{self.name}: a live panel; run this cell in JupyterLab to move its controls"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live view where somebody can use it; the picture and a line of text always, for readers on the web."""
        self.settle()
        live = {} if self._headless else super()._repr_mimebundle_(**kwargs) or {}
        data = live[0] if isinstance(live, tuple) else live
        still = {"image/png": base64.b64encode(self.picture.value).decode()} if self.picture.value else {}
        return {**data, "text/plain": repr(self), **still}
