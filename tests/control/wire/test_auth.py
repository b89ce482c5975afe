from skipper.control.wire import auth

SECRET = auth.new_secret()
TRANSCRIPT = (b"client nonce", b"server nonce", b"client", b"server")


def test_a_proof_is_good_for_its_transcript_role_and_secret_alone() -> None:
    proof = auth.client_proof(SECRET, *TRANSCRIPT)
    assert auth.verify(auth.client_proof(SECRET, *TRANSCRIPT), proof)
    assert not auth.verify(auth.server_proof(SECRET, *TRANSCRIPT), proof)  # no reflection
    assert not auth.verify(auth.client_proof(auth.new_secret(), *TRANSCRIPT), proof)
    for position in range(len(TRANSCRIPT)):
        other = [*TRANSCRIPT]
        other[position] += b"x"
        assert not auth.verify(auth.client_proof(SECRET, *other), proof)  # no replay


def test_parts_cannot_be_shifted_into_each_other() -> None:
    assert auth.client_proof(SECRET, b"ab", b"c") != auth.client_proof(SECRET, b"a", b"bc")


def test_only_bytes_of_the_right_length_are_compared() -> None:
    proof = auth.client_proof(SECRET, *TRANSCRIPT)
    assert len(proof) == auth.PROOF_NBYTES
    for wrong in (None, "x" * 32, proof[:-1], proof + b"x", bytearray(proof)):
        assert not auth.verify(proof, wrong)


def test_nonces_and_secrets_are_fresh() -> None:
    assert auth.new_nonce() != auth.new_nonce()
    assert auth.new_secret() != auth.new_secret()
