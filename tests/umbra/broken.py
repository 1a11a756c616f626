"""A plugin that needs a package that is not there."""

import a_package_that_is_not_installed  # type: ignore[import-not-found] # noqa: F401
