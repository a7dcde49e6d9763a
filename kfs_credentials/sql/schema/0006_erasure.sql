-- What erasure adds, in tables of our own: what became of each object, and the rounds that somebody has to make.
ALTER TABLE "kfs_credentials_secret_object"
  ADD COLUMN "first_claimed_at" TIMESTAMPTZ,
  ADD COLUMN "first_erased_at" TIMESTAMPTZ,
  ADD COLUMN "receipt" TEXT,
  ADD COLUMN "attention" TEXT,
  ADD COLUMN "abandoned_at" TIMESTAMPTZ,
  ADD COLUMN "abandoned_by" TEXT,
  ADD COLUMN "abandoned_reason" TEXT;

-- An object's name holds the SHA-256 of its ref: this is how the patrol gets from an object to its row. The cast takes
-- the bytes of any text without a backslash as they are, and a ref has none; unlike convert_to() it is immutable.
CREATE INDEX "kfs_credentials_secret_object_digest_idx"
  ON "kfs_credentials_secret_object" (sha256((replace("credential_ref", '\', ''))::bytea));
CREATE INDEX "kfs_credentials_secret_object_attention_idx"
  ON "kfs_credentials_secret_object" ("attention") WHERE "attention" IS NOT NULL;

CREATE TABLE "kfs_credentials_round" (
  "name" TEXT PRIMARY KEY NOT NULL,
  "worker_id" TEXT,
  "lease_token" UUID,
  "lease_expires_at" TIMESTAMPTZ,
  "started_at" TIMESTAMPTZ,
  "covers_until" TIMESTAMPTZ,
  "completed_at" TIMESTAMPTZ,
  "found" INTEGER NOT NULL
);
