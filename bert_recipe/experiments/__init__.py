"""Code for hardware that it has not run on, or where it is not faster: see README.md. Nothing
imports this package; parallel/attention_choice.py and optimization/registry.py name its parts.
"""
