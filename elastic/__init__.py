"""Runs on nodes that come and go, over Dask: a driver decides which nodes train together, and a guard below the Dask
worker of each node starts and stops the launch script there.

Leases keep two parts of a cluster from training at once. A guard kills its processes when the driver has not renewed
its lease for `lease_seconds`. The driver starts no others before a node that it cannot hear has done so.
"""
