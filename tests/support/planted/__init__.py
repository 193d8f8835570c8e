"""Faults, bugs and disk errors planted into the processes of a real pair."""
