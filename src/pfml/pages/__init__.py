"""Self-contained HTML pages: about a run, an audit, the demo."""
