"""Training reports: records.py reads logs, charts.py makes charts, page.py renders the page."""
