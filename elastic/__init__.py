"""Runs on nodes that come and go, over Dask: a driver decides which nodes train together
(membership), talks with the Dask worker of each (sessions), and a guard below that worker runs the
launch script as long as it has a lease.
"""
