"""The importable part of the fake distribution bmoe-umbra; its entry points are in umbra-0.1.dist-info beside it."""
