"""Fetchers: how expert bytes get from files to memory."""
