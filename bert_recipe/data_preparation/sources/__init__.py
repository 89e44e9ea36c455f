"""Reads documents from Wikipedia dumps, books, text files and tables, and downloads published data
sets.
"""
