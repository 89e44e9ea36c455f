"""Runs on nodes that come and go: a coordinator decides which nodes train together, and an agent on each node starts
and stops the launch script there.

Leases keep two parts of a cluster from training at once. An agent whose heartbeats the coordinator has not answered for
`lease_seconds` kills its processes. The coordinator starts no others before a node that it cannot hear has done so.
"""
