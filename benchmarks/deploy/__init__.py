"""Suite ``deploy``: exported models in processes of their own, each under the runtime that it was exported for."""
