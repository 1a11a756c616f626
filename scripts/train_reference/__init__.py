"""Train bmoe-ref, the small mixture-of-experts model that this project measures itself with."""
