"""The command line: one module a verb, the only place that sees the collector's wing and the servers' wing.

Verbs import what they need when they run, so that `--help` and completion answer at once.
"""
