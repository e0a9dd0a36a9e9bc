"""One command that runs the whole system and says how fresh every action was."""
