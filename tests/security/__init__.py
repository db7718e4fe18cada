"""Attacks by another user of the machine: a second user attacks every port and socket of a session."""
