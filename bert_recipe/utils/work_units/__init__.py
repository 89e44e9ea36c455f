"""Work that is done once: units with one output and one record each, in this process, a pool of
processes or a Dask cluster.
"""
