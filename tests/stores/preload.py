"""What every process of the tests has imported before it is forked: see `processes`."""

import django

django.setup()
