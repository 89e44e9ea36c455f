"""Reads training logs and writes the report page: records.py reads, charts.py draws, page.py lays out."""
