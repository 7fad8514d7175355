"""Data tasks of a user's own, as the text of their module."""

DEFECT = """
from mrl.data import synthetic_tasks

class Task(synthetic_tasks.Task):
    num_train = num_val = 1

    def train_row(self, index):
        return 1 / 0

    def val_row(self, index):
        return 1 / 0
"""
"""It imports, and fails at the first row: a defect, where a module that does not import is a mistake."""
