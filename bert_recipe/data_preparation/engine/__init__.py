"""Runs stages: units of work with records, on local processes or a Dask cluster."""
