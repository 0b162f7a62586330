"""Requests under way: dispatched to their pods, kept alive when pods die, spelled as text.

    Batch ──▶ TextGeneration ──▶ Generation ──▶ Legs ──▶ pods
                                     │
                                     ├──▶ Output, Retries, Record
                                     └──▶ Dispatcher ──▶ Planner, MigrationLine

What requests share is the Dispatcher's: the decision where each goes, and the line of those that have lost their
decode pod.
"""
