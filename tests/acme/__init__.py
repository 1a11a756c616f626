"""The importable part of the fake distribution bmoe-acme; its entry points are in acme-0.1.dist-info beside it."""
