"""Fixtures of the tests of the audit."""

import io

import pytest
from PIL import Image

from pfml.pages.page import Plot


@pytest.fixture
def without_plots(monkeypatch):
    """Pages with a gray square in place of every plot: matplotlib would take most of the time of a command."""
    buffer = io.BytesIO()
    Image.new("L", (4, 4)).save(buffer, "PNG")
    monkeypatch.setattr("pfml.pages.audit.in_themes", lambda plot, alt: Plot(buffer.getvalue(), alt))
    monkeypatch.setattr("pfml.pages.audit.plot_retrievals", lambda *_, **__: buffer.getvalue())
