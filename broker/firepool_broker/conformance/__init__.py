"""Suites that every implementation of a port runs, fakes and out-of-tree ones included.

Each module holds a class of sentences about one port; a test file subclasses it and provides the fixture that it names.
"""
