"""The recipe of the demo pair: data, target, drafter, evaluation and export in one command."""
