"""Parts of the estimators that do not depend on the framework."""
